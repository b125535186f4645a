/* Runs a Fortran subroutine under MPI, also where the MPI library has no Fortran of its own. */
#include <mpi.h>

void body(MPI_Fint world);

int main(int argc, char **argv) {
  MPI_Init(&argc, &argv);
  body(MPI_Comm_c2f(MPI_COMM_WORLD));
  MPI_Finalize();
  return 0;
}
