/* calls.c: requests of this guest, one at a time, and what comes back.
 *
 * Arguments are sent from the caller's memory. A wait that ends early must not leave MPI reading
 * it, so sends get some more time then; after that the caller is told.
 */
#include "calls.h"

#include "errors.h"
#include "names.h"
#include "receive.h"
#include "state.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

enum { BODY = 24576 };            /* bytes: 32 entries with names, and what is inline */
static const double GRACE = 2.0; /* seconds for sends after a wait that ended early */

static struct {
  uint64_t last; /* id */
  bool open;
  mi_parcel *reply;
} call;

int mi_on_reply(int rank, const mi_frame *frame, mi_parcel *parcel) {
  if (!call.open || frame->id != call.last || call.reply)
    return parcel ? mi_parcel_leave(parcel, mi_parcel_free) : MPIML_OK; /* of a former call */
  call.reply = parcel ? parcel : mi_parcel_of(rank, frame);
  return call.reply ? MPIML_OK : MPIML_ERR_MEMORY;
}

void mi_reply_done(mi_parcel *reply) {
  if (reply) mi_parcel_leave(reply, mi_parcel_free);
}

static bool answered(void *unused) {
  (void)unused;
  return call.reply != NULL && mi_borrowed() == 0;
}

static bool returned(void *unused) {
  (void)unused;
  return mi_borrowed() == 0;
}

/* After a wait that ended with `code`: sees to the sends, and completes the text. */
static int ended_early(int code, double seconds) {
  if (mi.broken) return code; /* nothing moves any more */
  char still[160] = "";
  if (mi_wait(returned, NULL, mi_now() + GRACE, MI_BY_NOTHING) != MPIML_OK)
    snprintf(still, sizeof still,
             " Its arguments are still being sent: leave their memory as it is until mpiml_leave.");
  if (code == MPIML_ERR_TIMEOUT)
    return mi_fail(code, "expected an answer within %.3g s, got none.%s", seconds, still);
  if (*still && code == mi.stop)
    return mi_fail(code, "the program ends: %s.%s", mi.reason ? mi.reason : "", still);
  return code;
}

/* The error that a reply is, with its text. */
static int error_of(const mi_frame *frame) {
  enum { HEAD = 8 };
  if (frame->encoding != MI_ERRORS || frame->body_size < HEAD)
    return mi_fail(MPIML_ERR_REMOTE, "got an error that cannot be read");
  int code = (int)mi_get(frame->body, 4);
  size_t length = (size_t)mi_get(frame->body + 4, 4);
  if (length > frame->body_size - HEAD) length = frame->body_size - HEAD;
  if (code <= MPIML_OK || code > MPIML_ERR_MEMORY) code = MPIML_ERR_REMOTE;
  return mi_fail(code, "%.*s", (int)length, (const char *)frame->body + HEAD);
}

int mi_argument(const mpiml_array *x, mi_entry *entry) {
  *entry = (mi_entry){.array = x};
  int code = mi_check(x, &entry->bytes);
  if (code == MPIML_OK) entry->spec = mi_spec_of(x);
  return code;
}

/* Sends the request; what is not dense is packed first. */
static int request(int rank, uint32_t target, const char *method, int form, int count,
                   mi_entry *entries) {
  unsigned char body[BODY];
  size_t lengths[MI_ENTRIES];
  const void *data[MI_ENTRIES];
  mi_block *blocks[MI_ENTRIES] = {NULL};
  mi_frame frame = {
      .kind = MI_REQUEST,
      .encoding = MI_ARRAYS,
      .flags = MI_NESTED,
      .source = mi.program.vertex,
      .target = target,
      .id = call.last,
      .name = method,
      .name_size = strlen(method),
      .body = body,
      .body_size = mi_body_write(body, BODY, form, count, entries),
  };
  if (frame.body_size == 0)
    return mi_fail(MPIML_ERR_USAGE, "expected at most %d arrays with short names", MI_ENTRIES);
  int code = MPIML_OK;
  for (int i = 0; i < count && code == MPIML_OK; ++i) {
    if (!entries[i].apart) continue;
    int k = frame.buffers++;
    lengths[k] = entries[i].bytes;
    data[k] = entries[i].array->data;
    if (mi_order(entries[i].array)) continue;
    blocks[k] = mi_take(entries[i].bytes);
    if (!blocks[k]) {
      code = mi_fail(MPIML_ERR_MEMORY, "no memory for %zu bytes", entries[i].bytes);
      break;
    }
    mi_pack(entries[i].array, blocks[k]->data);
    data[k] = blocks[k]->data;
  }
  if (code == MPIML_OK) code = mi_send(rank, &frame, lengths, data, blocks);
  for (int k = 0; k < frame.buffers; ++k) mi_drop(blocks[k]);
  return code;
}

int mi_ask(int rank, uint32_t target, const char *method, int form, int count, mi_entry *entries,
           double deadline, mi_parcel **reply) {
  double start = mi_now();
  ++call.last;
  call.open = true;
  int code = mi_partner(rank);
  if (code == MPIML_OK) code = request(rank, target, method, form, count, entries);
  if (code == MPIML_OK) {
    code = mi_wait(answered, NULL, deadline, MI_BY_STOP);
    if (code != MPIML_OK) code = ended_early(code, deadline - start);
  }
  call.open = false;
  *reply = call.reply;
  call.reply = NULL;
  if (code == MPIML_OK && (*reply)->frame.kind == MI_ERROR) code = error_of(&(*reply)->frame);
  if (code == MPIML_OK) return code;
  mi_reply_done(*reply);
  *reply = NULL;
  return code;
}

/* Brings what a method returned into the caller's memory. */
static int results(mi_parcel *reply, int nout, mpiml_array *out, double deadline) {
  mi_entry entries[MI_ENTRIES];
  mpiml_array *targets[MI_ENTRIES];
  int form, count = mi_body_read(&reply->frame, &form, entries);
  if (count < 0)
    return mi_fail(MPIML_ERR_DTYPE, "expected arrays, got a reply that cannot be read");
  if (nout == 0) return MPIML_OK;
  if (count != nout)
    return mi_fail(MPIML_ERR_SHAPE, "expected nout = %d arrays, but the method returned %d", nout,
                   count);
  for (int i = 0; i < nout; ++i) {
    mi_in("out", i);
    int code = mi_match(&out[i], &entries[i].spec);
    if (code != MPIML_OK) return code;
    targets[i] = &out[i];
  }
  mi_in(NULL, 0);
  return mi_receive(reply, nout, entries, targets, deadline);
}

int mpiml_call(const char *service_name, const char *method, int nin, const mpiml_array *in,
               int nout, mpiml_array *out, double timeout) {
  mi_at("mpiml_call", service_name, method);
  int code = mi_enter(false);
  if (code != MPIML_OK) return code;
  const mi_service *service;
  const mi_replica *replica = mi_replica_named(service_name, &service);
  if (!replica) return MPIML_ERR_SERVICE;
  code = mi_method_named(service, method);
  if (code != MPIML_OK) return code;
  if (nin < 0 || nin > MI_ENTRIES || nout < 0 || nout > MI_ENTRIES || (nin && !in) ||
      (nout && !out))
    return mi_fail(MPIML_ERR_USAGE, "expected 0 to %d arrays in and out, got nin = %d and nout = %d%s",
                   MI_ENTRIES, nin, nout, (nin && !in) || (nout && !out) ? ", and NULL" : "");
  mi_entry entries[MI_ENTRIES];
  for (int i = 0; i < nin && code == MPIML_OK; ++i) {
    mi_in("in", i);
    code = mi_argument(&in[i], &entries[i]);
  }
  for (int i = 0; i < nout && code == MPIML_OK; ++i) {
    mi_in("out", i);
    code = mi_check(&out[i], NULL);
  }
  if (code != MPIML_OK) return code;
  mi_in(NULL, 0);
  double deadline = timeout > 0 ? mi_now() + timeout : INFINITY;
  mi_parcel *reply;
  code = mi_ask(replica->rank, replica->vertex, method, MI_TUPLE, nin, entries, deadline, &reply);
  if (code != MPIML_OK) return code;
  code = results(reply, nout, out, deadline);
  mi_reply_done(reply);
  return code;
}
