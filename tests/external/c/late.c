/* late.c: one rank whose attach fails when all others have been told that there is a program. */
#include "checks.h"

static int fail_here;

/* Stands before MPI's own. */
int MPI_Recv_init(void *data, int count, MPI_Datatype type, int source, int tag, MPI_Comm comm,
                  MPI_Request *request) {
  return fail_here ? MPI_ERR_OTHER
                   : PMPI_Recv_init(data, count, type, source, tag, comm, request);
}

int main(int argc, char **argv) {
  MPI_Init(&argc, &argv);
  int rank;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  fail_here = rank == atoi(argv[1]);
  MPI_Comm own;
  if (fail_here)
    SAYS(MPIML_ERR_MPI, "MPI_Recv_init failed", mpiml_attach(MPI_COMM_WORLD, "solver", &own));
  else
    SAYS(MPIML_ERR_ATTACH, "rank 1 could not", mpiml_attach(MPI_COMM_WORLD, "solver", &own));
  GIVES(MPIML_ERR_NOT_ATTACHED, mpiml_leave());
  puts("refused");
  MPI_Finalize();
  return 0;
}
