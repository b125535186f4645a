/* link.c: frames and their buffers over MPI, and progress.
 *
 * One receive of MI_SLOT bytes is always posted; buffers are asked for one by one, in the order
 * in which each rank sends them. Everything moves inside mi_poll.
 */
#include "link.h"

#include "errors.h"
#include "flight.h"
#include "mpi_error.h"
#include "state.h"

#include <math.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { TAG_FRAME = 1, TAG_DATA = 2, CHUNK = 1 << 29, AT_ONCE = 64 };

static MPI_Comm comm = MPI_COMM_NULL;
static MPI_Request slot = MPI_REQUEST_NULL;
static unsigned char slot_bytes[MI_SLOT];
static bool armed;
static mi_flight sends;    /* owners: their blocks; NULL for memory of the caller */
static mi_flight receives; /* owners: their parcels */
static int borrowed;
static mi_parcel *unposted, **unposted_end = &unposted;

int mi_mpi(const char *call, int error) {
  if (error == MPI_SUCCESS) return MPIML_OK;
  char reason[MPI_MAX_ERROR_STRING + 1] = "";
  int length = 0;
  if (MPI_Error_string(error, reason, &length) != MPI_SUCCESS) reason[0] = '\0';
  mi.broken = MPIML_ERR_MPI;
  return mi_fail(MPIML_ERR_MPI, "%s failed with code %d: %s", call, error, reason);
}

static int no_memory(void) { return mi_fail(MPIML_ERR_MEMORY, "no memory for a message"); }

double mi_now(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

int mi_link_open(MPI_Comm given) {
  comm = given;
  int code = mi_mpi("MPI_Recv_init", MPI_Recv_init(slot_bytes, MI_SLOT, MPI_BYTE, MPI_ANY_SOURCE,
                                                   TAG_FRAME, comm, &slot));
  if (code != MPIML_OK) return code;
  armed = true;
  return mi_mpi("MPI_Start", MPI_Start(&slot));
}

int mi_link_close(void) {
  int code = MPIML_OK;
  if (armed && slot != MPI_REQUEST_NULL) {
    code = mi_mpi("MPI_Cancel", MPI_Cancel(&slot));
    if (code == MPIML_OK) code = mi_mpi("MPI_Wait", MPI_Wait(&slot, MPI_STATUS_IGNORE));
  }
  armed = false;
  if (slot != MPI_REQUEST_NULL) MPI_Request_free(&slot);
  if (mi_moving() == 0) {
    mi_flight_free(&sends);
    mi_flight_free(&receives);
    if (code == MPIML_OK) code = mi_mpi("MPI_Comm_free", MPI_Comm_free(&comm));
    mi_memory_clear();
  }
  return code;
}

/* -- sending --------------------------------------------------------------------------- */

int mi_borrowed(void) { return borrowed; }

int mi_moving(void) { return sends.count + receives.count; }

static int send_one(int rank, int tag, const void *data, size_t bytes, mi_block *block) {
  if (!mi_flight_reserve(&sends)) return no_memory();
  MPI_Request request;
  int code = mi_mpi("MPI_Isend", MPI_Isend(data, (int)bytes, MPI_BYTE, rank, tag, comm, &request));
  if (code != MPIML_OK) return code;
  mi_flight_add(&sends, request, block ? mi_hold(block) : NULL);
  borrowed += block == NULL;
  return MPIML_OK;
}

int mi_send(int rank, const mi_frame *frame, const size_t *lengths, const void *const *data,
            mi_block *const *blocks) {
  if (mi.broken) return mi_fail(mi.broken, "MPI has failed before: this rank can only end");
  size_t size = MI_HEADER + frame->name_size + frame->body_size + 8 * (size_t)frame->buffers;
  mi_block *block = mi_take(size);
  if (!block) return no_memory();
  int code = MPIML_OK;
  if (mi_frame_write(block->data, frame, lengths) == 0)
    code = mi_fail(MPIML_ERR_USAGE, "expected names that fit a message of %d bytes with all else",
                   MI_SLOT);
  else
    code = send_one(rank, TAG_FRAME, block->data, size, block);
  mi_drop(block);
  for (int i = 0; i < frame->buffers && code == MPIML_OK; ++i)
    for (size_t at = 0; at < lengths[i] && code == MPIML_OK; at += CHUNK) {
      size_t bytes = lengths[i] - at < CHUNK ? lengths[i] - at : CHUNK;
      code = send_one(rank, TAG_DATA, (const char *)data[i] + at, bytes, blocks[i]);
    }
  mi_ring(rank);
  return code;
}

static int move_sends(void) {
  int ended;
  int code = mi_mpi("MPI_Testsome", mi_flight_test(&sends, &ended));
  for (int i = 0; i < ended; ++i) {
    borrowed -= sends.finished[i] == NULL;
    mi_drop(sends.finished[i]);
  }
  return code;
}

/* -- receiving ------------------------------------------------------------------------- */

mi_parcel *mi_parcel_of(int rank, const mi_frame *frame) {
  size_t size =
      MI_HEADER + frame->name_size + frame->body_size + 8 * (size_t)frame->buffers;
  mi_parcel *parcel = calloc(1, sizeof *parcel);
  mi_block *bytes = mi_take(size);
  if (!parcel || !bytes) {
    free(parcel);
    mi_drop(bytes);
    no_memory();
    return NULL;
  }
  memcpy(bytes->data, (const unsigned char *)frame->name - MI_HEADER, size);
  mi_frame_read(bytes->data, size, &parcel->frame);
  parcel->rank = rank;
  parcel->bytes = bytes;
  parcel->posted = frame->buffers == 0;
  return parcel;
}

void mi_parcel_free(mi_parcel *parcel) {
  if (!parcel) return;
  for (int i = 0; i < MI_ENTRIES; ++i) mi_drop(parcel->blocks[i]);
  mi_drop(parcel->bytes);
  free(parcel);
}

static int receive_one(mi_parcel *parcel, char *memory, size_t bytes) {
  if (!mi_flight_reserve(&receives)) return no_memory();
  MPI_Request request;
  int code = mi_mpi("MPI_Irecv", MPI_Irecv(memory, (int)bytes, MPI_BYTE, parcel->rank, TAG_DATA,
                                           comm, &request));
  if (code != MPIML_OK) return code;
  mi_flight_add(&receives, request, parcel);
  ++parcel->open;
  return MPIML_OK;
}

static int post(mi_parcel *parcel, void *const *memory) {
  parcel->posted = true;
  int code = MPIML_OK;
  for (int i = 0; i < parcel->frame.buffers && code == MPIML_OK; ++i) {
    size_t length = mi_frame_length(&parcel->frame, i);
    parcel->memory[i] = memory ? memory[i] : NULL;
    if (!parcel->memory[i]) {
      parcel->blocks[i] = mi_take(length);
      if (!parcel->blocks[i]) {
        mi.broken = MPIML_ERR_MEMORY; /* what comes next would be taken for this */
        return no_memory();
      }
      parcel->memory[i] = parcel->blocks[i]->data;
    }
    for (size_t at = 0; at < length && code == MPIML_OK; at += CHUNK)
      code = receive_one(parcel, (char *)parcel->memory[i] + at,
                         length - at < CHUNK ? length - at : CHUNK);
  }
  return code;
}

int mi_parcel_post(mi_parcel *parcel, void *const *memory) {
  if (parcel->posted) return MPIML_OK;
  int code = MPIML_OK;
  for (mi_parcel **at = &unposted; *at && code == MPIML_OK && !parcel->posted;) {
    mi_parcel *each = *at;
    if (each->rank != parcel->rank) {
      at = &each->next;
      continue;
    }
    *at = each->next;
    if (!each->next) unposted_end = at;
    code = post(each, each == parcel ? memory : NULL);
  }
  return code;
}

bool mi_parcel_there(void *argument) {
  const mi_parcel *parcel = argument;
  return parcel->posted && parcel->open == 0;
}

int mi_parcel_leave(mi_parcel *parcel, void (*finish)(mi_parcel *)) {
  int code = mi_parcel_post(parcel, NULL);
  if (mi_parcel_there(parcel)) finish(parcel);
  else parcel->finish = finish;
  return code;
}

static int move_receives(void) {
  int ended;
  int code = mi_mpi("MPI_Testsome", mi_flight_test(&receives, &ended));
  for (int i = 0; i < ended; ++i) {
    mi_parcel *parcel = receives.finished[i];
    if (--parcel->open == 0 && parcel->finish) parcel->finish(parcel); /* sends, asks for nothing */
  }
  return code;
}

/* Takes in the frame in the slot. */
static int take_in(const MPI_Status *status) {
  int size = 0;
  int code = mi_mpi("MPI_Get_count", MPI_Get_count(status, MPI_BYTE, &size));
  if (code != MPIML_OK) return code;
  mi_frame frame;
  if (!mi_frame_read(slot_bytes, (size_t)size, &frame)) {
    mi.broken = MPIML_ERR_VERSION;
    return mi_fail(mi.broken, "expected a frame of version 1, got %d bytes of rank %d that are none",
                   size, status->MPI_SOURCE);
  }
  mi_parcel *parcel = NULL;
  if (frame.buffers) {
    parcel = mi_parcel_of(status->MPI_SOURCE, &frame);
    if (!parcel) return mi.broken = MPIML_ERR_MEMORY;
    *unposted_end = parcel;
    unposted_end = &parcel->next;
  }
  return mi_deliver(status->MPI_SOURCE, &frame, parcel);
}

/* -- progress -------------------------------------------------------------------------- */

int mi_poll(void) {
  if (mi.broken) return mi_fail(mi.broken, "MPI has failed before: this rank can only end");
  for (int i = 0; i < AT_ONCE; ++i) {
    int there = 0;
    MPI_Status status;
    int code = mi_mpi("MPI_Test", MPI_Test(&slot, &there, &status));
    if (code != MPIML_OK) return code;
    if (!there) break;
    armed = false;
    code = take_in(&status);
    int again = mi_mpi("MPI_Start", MPI_Start(&slot));
    armed = again == MPIML_OK;
    if (code != MPIML_OK || again != MPIML_OK) return code != MPIML_OK ? code : again;
  }
  int code = receives.count ? move_receives() : MPIML_OK;
  if (code == MPIML_OK && sends.count) code = move_sends();
  return code;
}

/* Lets others have the core: at once after each turn, for longer when nothing comes for long. */
static void rest(unsigned turns) {
  enum { SPIN = 20, YIELD = 20000 };
  if (turns < SPIN) return;
  if (turns < YIELD) {
    sched_yield();
    return;
  }
  struct timespec nap = {0, mi_moving() ? 20000 : 100000};
  nanosleep(&nap, NULL);
}

int mi_wait(bool (*ready)(void *), void *argument, double deadline, int ends) {
  for (unsigned turns = 0; !ready(argument); ++turns) {
    int code = mi_poll();
    if (code != MPIML_OK) return code;
    if (ready(argument)) break;
    if ((ends == MI_BY_STOP && mi.stop) || (ends == MI_BY_FAILURE && mi.stop == MPIML_ERR_FAILED))
      return mi_stopped();
    if (!isinf(deadline) && mi_now() > deadline) return MPIML_ERR_TIMEOUT;
    rest(turns);
  }
  return MPIML_OK;
}
