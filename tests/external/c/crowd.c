/* crowd.c: guests of several labels, in any order of ranks, over the world or a part of it; see
 * crowd.py. Arguments: the label, and "part" to leave world rank 0 out and turn the ranks round. */
#include "checks.h"

int main(int argc, char **argv) {
  MPI_Init(&argc, &argv);
  MPI_Comm comm = MPI_COMM_WORLD, own;
  int world, rank, size;
  MPI_Comm_rank(MPI_COMM_WORLD, &world);
  if (argc > 2) {
    MPI_Comm_split(MPI_COMM_WORLD, world ? 0 : MPI_UNDEFINED, -world, &comm);
    if (comm == MPI_COMM_NULL) {
      MPI_Finalize();
      return 0;
    }
  }
  GIVES(MPIML_OK, mpiml_attach(comm, argv[1], &own));
  if (argc > 2) MPI_Comm_free(&comm); /* the library has its own */
  MPI_Comm_rank(own, &rank);
  MPI_Comm_size(own, &size);
  double there[4] = {argv[1][0] == 'r', rank, size, world}, back[4] = {0};
  const int64_t four[1] = {4};
  mpiml_array x = mpiml_array_c(there, MPIML_FLOAT64, 1, four);
  mpiml_array y = mpiml_array_c(back, MPIML_FLOAT64, 1, four);
  GIVES(MPIML_OK, mpiml_call("net", "echo", 1, &x, 1, &y, 0));
  CHECK(memcmp(there, back, sizeof there) == 0);
  GIVES(MPIML_OK, mpiml_call("net", "echo", 1, &x, 1, &x, 0)); /* in its own place */
  CHECK(memcmp(there, back, sizeof there) == 0);
  GIVES(MPIML_OK, mpiml_publish("said", &y));
  GIVES(MPIML_OK, mpiml_leave());
  MPI_Comm_free(&own);
  MPI_Finalize();
  return 0;
}
