/* flight.c: MPI requests that are under way, each with what it belongs to. */
#include "flight.h"

#include <stdlib.h>

bool mi_flight_reserve(mi_flight *flight) {
  if (flight->count < flight->room) return true;
  size_t room = flight->room ? 2 * (size_t)flight->room : 16;
  MPI_Request *requests = realloc(flight->requests, room * sizeof *requests);
  if (requests) flight->requests = requests;
  void **owners = realloc(flight->owners, room * sizeof *owners);
  if (owners) flight->owners = owners;
  int *done = realloc(flight->done, room * sizeof *done);
  if (done) flight->done = done;
  void **finished = realloc(flight->finished, room * sizeof *finished);
  if (finished) flight->finished = finished;
  if (!requests || !owners || !done || !finished) return false;
  flight->room = (int)room;
  return true;
}

void mi_flight_add(mi_flight *flight, MPI_Request request, void *owner) {
  flight->requests[flight->count] = request;
  flight->owners[flight->count++] = owner;
}

int mi_flight_test(mi_flight *flight, int *ended) {
  *ended = 0;
  if (flight->count == 0) return MPI_SUCCESS;
  int code = MPI_Testsome(flight->count, flight->requests, ended, flight->done,
                          MPI_STATUSES_IGNORE);
  if (code != MPI_SUCCESS || *ended == MPI_UNDEFINED) {
    *ended = 0;
    return code;
  }
  for (int i = 0; i < *ended; ++i) flight->finished[i] = flight->owners[flight->done[i]];
  int kept = 0;
  for (int i = 0; *ended && i < flight->count; ++i) {
    if (flight->requests[i] == MPI_REQUEST_NULL) continue; /* one that ended */
    flight->requests[kept] = flight->requests[i];
    flight->owners[kept++] = flight->owners[i];
  }
  if (*ended) flight->count = kept;
  return MPI_SUCCESS;
}

void mi_flight_free(mi_flight *flight) {
  free(flight->requests);
  free(flight->owners);
  free(flight->done);
  free(flight->finished);
  *flight = (mi_flight){0};
}
