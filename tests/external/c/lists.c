/* lists.c: arrays of a tree with lists in it, by their paths. */
#include "checks.h"

int main(int argc, char **argv) {
  MPI_Init(&argc, &argv);
  MPI_Comm own;
  GIVES(MPIML_OK, mpiml_attach(MPI_COMM_WORLD, "solver", &own));
  float w[6] = {0}, g[6] = {1, 2, 3, 4, 5, 6}, b[3] = {9, 9, 9}, v[3] = {9, 9, 9};
  const int64_t shape[2] = {2, 3}, three[1] = {3};
  mpiml_array into = mpiml_array_c(w, MPIML_FLOAT32, 2, shape);
  mpiml_array step = mpiml_array_c(g, MPIML_FLOAT32, 2, shape);
  mpiml_array bias = mpiml_array_c(b, MPIML_FLOAT32, 1, three);
  mpiml_array next = mpiml_array_c(v, MPIML_FLOAT32, 1, three);
  int64_t version = -1, after = -1;
  GIVES(MPIML_OK, mpiml_pull("ps", "layers/0/w", &into, &version));
  GIVES(MPIML_OK, mpiml_push("ps", "layers/0/w", &step, version));
  GIVES(MPIML_OK, mpiml_pull("ps", "layers/0/w", &into, &after));
  CHECK(after == version + 1);
  for (int i = 0; i < 6; ++i) CHECK(w[i] == -0.5f * g[i]);
  GIVES(MPIML_OK, mpiml_pull("ps", "layers/0/b", &bias, &after));
  GIVES(MPIML_OK, mpiml_pull("ps", "layers/1/w", &next, &after));
  for (int i = 0; i < 3; ++i) CHECK(b[i] == 0 && v[i] == 0); /* beside the step */
  for (int i = 0; i < 3; ++i) b[i] = 2;
  GIVES(MPIML_OK, mpiml_push("ps", "0", &bias, after));
  GIVES(MPIML_OK, mpiml_pull("ps", "0", &next, &after));
  for (int i = 0; i < 3; ++i) CHECK(v[i] == -1);
  SAYS(MPIML_ERR_METHOD, "a part of the tree", mpiml_push("ps", "layers/0", &step, after));
  SAYS(MPIML_ERR_METHOD, "'layers/1/w'", mpiml_push("ps", "layers/2/w", &step, after));
  GIVES(MPIML_OK, mpiml_leave());
  MPI_Comm_free(&own);
  MPI_Finalize();
  puts("all paths are right");
  return 0;
}
