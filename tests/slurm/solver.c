/* solver.c: an MPI code that calls a service with its rank, or steps until the program stops. */
#include <mpi.h>
#include <mpiml.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void must(int code) {
  if (code == MPIML_OK || code == MPIML_STOPPED) return;
  fprintf(stderr, "solver: %s\n", mpiml_error());
  MPI_Abort(MPI_COMM_WORLD, 3);
}

int main(int argc, char **argv) {
  int given = 0, stopping = 0;
  MPI_Comm own;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &given);
  must(mpiml_attach(MPI_COMM_WORLD, "solver", &own));
  int rank = 0, size = 0;
  MPI_Comm_rank(own, &rank);
  MPI_Comm_size(own, &size);
  if (argc > 1 && strcmp(argv[1], "wait") == 0) {
    printf("solver %d steps\n", rank);
    fflush(stdout);
    while (!stopping) {
      poll(NULL, 0, 10);
      must(mpiml_stopping(&stopping));
    }
    printf("solver %d told\n", rank);
  } else {
    double x = rank, y = 0;
    mpiml_array in = mpiml_array_c(&x, MPIML_FLOAT64, 0, NULL);
    mpiml_array out = mpiml_array_c(&y, MPIML_FLOAT64, 0, NULL);
    must(mpiml_call("trainer", "double", 1, &in, 1, &out, 30));
    printf("solver %d of %d got %g\n", rank, size, y);
  }
  fflush(stdout);
  must(mpiml_leave());
  MPI_Finalize();
  return 0;
}
