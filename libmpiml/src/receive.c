/* receive.c: arrays of a parcel, into the caller's memory. */
#include "receive.h"

#include "errors.h"

#include <math.h>
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

int mi_receive(mi_parcel *parcel, int count, mi_entry *entries, mpiml_array *const *targets) {
  void *memory[MI_ENTRIES] = {NULL};
  for (int i = 0, buffer = 0; i < count; ++i)
    if (entries[i].apart) {
      if (direct(&entries[i], targets[i])) memory[buffer] = targets[i]->data;
      ++buffer;
    }
  int code = mi_parcel_post(parcel, memory);
  if (code == MPIML_OK && !mi_parcel_there(parcel))
    code = mi_wait(mi_parcel_there, parcel, INFINITY, MI_BY_FAILURE);
  if (code != MPIML_OK) return code;
  for (int i = 0, buffer = 0; i < count; ++i) {
    const void *from = entries[i].apart ? parcel->memory[buffer++] : entries[i].elements;
    if (!targets[i] || entries[i].bytes == 0 || from == targets[i]->data) continue;
    mi_unpack(targets[i], entries[i].spec.order, from);
  }
  return MPIML_OK;
}
