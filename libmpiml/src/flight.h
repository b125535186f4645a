/* flight.h: MPI requests that are under way, each with what it belongs to. */
#ifndef MPIML_FLIGHT_H
#define MPIML_FLIGHT_H

#include <mpi.h>
#include <stdbool.h>

typedef struct mi_flight {
  int count, room;
  MPI_Request *requests;
  void **owners;
  int *done;       /* indices of those that ended; scratch */
  void **finished; /* their owners; scratch */
} mi_flight;

/* Makes room for one more; false without memory. To be called before the request is started. */
bool mi_flight_reserve(mi_flight *flight);

/* Adds a request, for which there is room. */
void mi_flight_add(mi_flight *flight, MPI_Request request, void *owner);

/* Asks all of them, in one turn of MPI's progress: a test of each would take a turn each. Those
 * that ended are taken out; *ended receives how many, and their owners are in `finished`. Returns
 * MPI's code. */
int mi_flight_test(mi_flight *flight, int *ended);

void mi_flight_free(mi_flight *flight);

#endif
