/* receive.h: arrays of a parcel, into the caller's memory. */
#ifndef MPIML_RECEIVE_H
#define MPIML_RECEIVE_H

#include "link.h"

/* Brings entry i of a parcel into *targets[i], for those that are not NULL, and waits until
 * they are there: straight into it where the elements are apart and the orders agree. Ends with a
 * stop, or at `deadline` (mi_now); the text says so if MPI still writes into that memory then. */
int mi_receive(mi_parcel *parcel, int count, mi_entry *entries, mpiml_array *const *targets,
               double deadline);

#endif
