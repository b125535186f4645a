/* between.c: large arrays of two publishers: one comes while another is being received. */
#include "checks.h"

enum { MANY = 100, N = 200000 };

int main(int argc, char **argv) {
  MPI_Init(&argc, &argv);
  MPI_Comm own;
  GIVES(MPIML_OK, mpiml_attach(MPI_COMM_WORLD, "solver", &own));
  const int64_t shape[1] = {N};
  double *y = malloc(sizeof(double) * N);
  mpiml_array into = mpiml_array_c(y, MPIML_FLOAT64, 1, shape);
  int64_t version = 0, last = 0;
  while (version < 2 * MANY) {
    GIVES(MPIML_OK, mpiml_newest("big", &into, &version));
    CHECK(version >= last);
    if (version == last) continue;
    last = version;
    for (int i = 1; i < N; ++i) CHECK(y[i] == y[0]);
  }
  CHECK(y[0] == MANY);
  free(y);
  GIVES(MPIML_OK, mpiml_leave());
  MPI_Comm_free(&own);
  MPI_Finalize();
  puts("none was lost between");
  return 0;
}
