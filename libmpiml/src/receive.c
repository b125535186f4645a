/* receive.c: arrays of a parcel, into the caller's memory. */
#include "receive.h"

#include "errors.h"
#include "state.h"

#include <string.h>

/* Whether the elements can be received where they belong. */
static bool direct(const mi_entry *entry, const mpiml_array *target) {
  if (!target) return false;
  if (mi_order(target) == entry->spec.order) return true;
  /* dense in one order, and the same in the other: at most one length is not 1 */
  int longer = 0;
  for (int i = 0; i < entry->spec.ndim; ++i) longer += entry->spec.shape[i] > 1;
  return mi_order(target) != 0 && longer < 2;
}

/* After a wait that ended with `code`: MPI must not write into memory that its owner uses again.
 * Data that is under way cannot be called back, but soon is there, unless its sender hangs. */
static int ended_early(mi_parcel *parcel, int code) {
  static const double GRACE = 2.0, AFTER_FAILURE = 10.0; /* seconds; then such a job is ended */
  if (mi.broken) return code; /* nothing moves any more */
  double grace = code == MPIML_ERR_FAILED ? AFTER_FAILURE : GRACE;
  bool there = mi_wait(mi_parcel_there, parcel, mi_now() + grace, MI_BY_NOTHING) == MPIML_OK;
  const char *still = there ? "" : " Results are still being received: leave their memory as it is "
                                   "until mpiml_leave.";
  if (code == MPIML_ERR_TIMEOUT)
    return mi_fail(code, "expected the whole answer in time, got a part of it.%s", still);
  if (there) return mi.stop ? mi_stopped() : code;
  return mi_fail(code, "the program ends: %s.%s", mi.reason ? mi.reason : "", still);
}

int mi_receive(mi_parcel *parcel, int count, mi_entry *entries, mpiml_array *const *targets,
               double deadline) {
  void *memory[MI_ENTRIES] = {NULL};
  for (int i = 0, buffer = 0; i < count; ++i)
    if (entries[i].apart) {
      if (direct(&entries[i], targets[i])) memory[buffer] = targets[i]->data;
      ++buffer;
    }
  int code = mi_parcel_post(parcel, memory);
  if (code == MPIML_OK && !mi_parcel_there(parcel)) {
    code = mi_wait(mi_parcel_there, parcel, deadline, MI_BY_STOP);
    if (code != MPIML_OK) code = ended_early(parcel, code);
  }
  if (code != MPIML_OK) return code;
  for (int i = 0, buffer = 0; i < count; ++i) {
    const void *from = entries[i].apart ? parcel->memory[buffer++] : entries[i].elements;
    if (!targets[i] || entries[i].bytes == 0 || from == targets[i]->data) continue;
    mi_unpack(targets[i], entries[i].spec.order, from);
  }
  return MPIML_OK;
}
