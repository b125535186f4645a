/* calls.c: calls of a service and of a parameter server, by two ranks; see calls.py. */
#include "checks.h"

#include <complex.h>

enum { MOST = 1 << 20 };

static mpiml_array dense(void *data, int dtype, int ndim, const int64_t *shape, char order) {
  return order == 'F' ? mpiml_array_f(data, dtype, ndim, shape)
                      : mpiml_array_c(data, dtype, ndim, shape);
}

/* Each dtype goes there and back, in both orders, small and large. */
static void all_dtypes(void) {
  static unsigned char there[16 * 60000], back[16 * 60000 + 1];
  const size_t sizes[] = {0, 1, 1, 2, 4, 8, 1, 2, 4, 8, 2, 4, 8, 8, 16};
  const int64_t shapes[][3] = {{3, 4, 5}, {30, 40, 50}, {3, 0, 5}};
  for (int dtype = MPIML_BOOL; dtype <= MPIML_COMPLEX128; ++dtype)
    for (int s = 0; s < 3; ++s)
      for (int order = 0; order < 2; ++order) {
        const int64_t *shape = shapes[s];
        size_t bytes = sizes[dtype] * (size_t)(shape[0] * shape[1] * shape[2]);
        for (size_t i = 0; i < bytes; ++i)
          there[i] = (unsigned char)(dtype == MPIML_BOOL ? i % 2 : i % 61);
        memset(back, 255, bytes + 1);
        mpiml_array in = dense(there, dtype, 3, shape, "CF"[order]);
        mpiml_array out = dense(back, dtype, 3, shape, "CF"[order]);
        GIVES(MPIML_OK, mpiml_call("net", "echo", 1, &in, 1, &out, 30));
        CHECK(memcmp(there, back, bytes) == 0);
        CHECK(back[bytes] == 255);
      }
}

/* x(i, j) is x[i, j] in Python, whatever the order; an answer in the other one is turned. */
static void orders(void) {
  static double x[200 * 300], y[200 * 300];
  for (int size = 1; size <= 100; size += 99) {
    const int64_t shape[2] = {2 * size, 3 * size};
    for (int64_t i = 0; i < shape[0]; ++i)
      for (int64_t j = 0; j < shape[1]; ++j) x[i + j * shape[0]] = (double)(1000 * i + j);
    mpiml_array in = mpiml_array_f(x, MPIML_FLOAT64, 2, shape);
    mpiml_array out = mpiml_array_c(y, MPIML_FLOAT64, 2, shape);
    GIVES(MPIML_OK, mpiml_call("net", "indices", 1, &in, 1, &out, 30));
    for (int64_t i = 0; i < shape[0]; ++i)
      for (int64_t j = 0; j < shape[1]; ++j)
        CHECK(y[i * shape[1] + j] == (double)(1000 * i + j));
  }
}

/* Views with steps of any sign, in and out; nothing beside them is written to. */
static void strides(void) {
  static float x[400 * 300], y[400 * 300];
  for (int i = 0; i < 400 * 300; ++i) x[i] = (float)i;
  for (int rows = 4; rows <= 400; rows += 396) {
    const int64_t shape[2] = {rows / 2, 100}; /* every second row backwards, every third column */
    mpiml_array in = mpiml_array_c(&x[(rows - 1) * 300 + 2], MPIML_FLOAT32, 2, shape);
    in.strides[0] = -2 * 300 * (int64_t)sizeof(float);
    in.strides[1] = 3 * (int64_t)sizeof(float);
    mpiml_array out = in;
    for (int i = 0; i < 400 * 300; ++i) y[i] = -1;
    out.data = &y[(rows - 1) * 300 + 2];
    GIVES(MPIML_OK, mpiml_call("net", "echo", 1, &in, 1, &out, 30));
    for (int i = 0; i < rows; ++i)
      for (int j = 0; j < 300; ++j)
        CHECK(y[i * 300 + j] == (i % 2 == 1 && j % 3 == 2 ? x[i * 300 + j] : -1.0F));
  }
}

static void several(void) {
  double a = 3, b[2] = {1, 2}, sum = 0, product[2] = {0};
  int32_t n = 0;
  const int64_t two[1] = {2};
  mpiml_array in[2] = {mpiml_array_c(&a, MPIML_FLOAT64, 0, NULL),
                       mpiml_array_c(b, MPIML_FLOAT64, 1, two)};
  mpiml_array out[3] = {mpiml_array_c(&sum, MPIML_FLOAT64, 0, NULL),
                        mpiml_array_c(product, MPIML_FLOAT64, 1, two),
                        mpiml_array_c(&n, MPIML_INT32, 0, NULL)};
  GIVES(MPIML_OK, mpiml_call("net", "several", 2, in, 3, out, 30));
  CHECK(sum == 6 && product[0] == 3 && product[1] == 6 && n == 2);
  GIVES(MPIML_OK, mpiml_call("net/0", "several", 2, in, 3, out, 0));
  GIVES(MPIML_OK, mpiml_call("net", "nothing", 0, NULL, 0, NULL, 30));
  GIVES(MPIML_OK, mpiml_call("net", "several", 2, in, 0, NULL, 30)); /* what it returns is dropped */
  double one = 0;
  mpiml_array number = mpiml_array_c(&one, MPIML_FLOAT64, 0, NULL);
  GIVES(MPIML_OK, mpiml_call("net", "half", 0, NULL, 1, &number, 30));
  CHECK(one == 0.5);
  SAYS(MPIML_ERR_SHAPE, "nout = 2 arrays, but the method returned 3",
       mpiml_call("net", "several", 2, in, 2, out, 30));
  SAYS(MPIML_ERR_SHAPE, "but the method returned 0",
       mpiml_call("net", "nothing", 0, NULL, 1, out, 30));
}

static void refused(void) {
  static float large[MOST];
  double x[3] = {1, 2, 3};
  float y[3] = {0};
  const int64_t three[1] = {3}, four[1] = {4}, most[1] = {MOST};
  mpiml_array in = mpiml_array_c(x, MPIML_FLOAT64, 1, three);
  mpiml_array out = mpiml_array_c(y, MPIML_FLOAT32, 1, three);
  SAYS(MPIML_ERR_DTYPE, "mpiml_call(\"net\", \"echo\") on rank ",
       mpiml_call("net", "echo", 1, &in, 1, &out, 30));
  SAYS(MPIML_ERR_DTYPE, "expected float32, the dtype of your memory, got float64",
       mpiml_call("net", "echo", 1, &in, 1, &out, 30));
  out = mpiml_array_c(x, MPIML_FLOAT64, 1, four);
  SAYS(MPIML_ERR_SHAPE, "expected shape (4,), that of your memory, got (3,)",
       mpiml_call("net", "echo", 1, &in, 1, &out, 30));
  out = mpiml_array_c(large, MPIML_INT32, 1, most); /* a large answer that is not taken */
  mpiml_array into = mpiml_array_c(large, MPIML_FLOAT32, 1, most);
  SAYS(MPIML_ERR_DTYPE, "expected int32", mpiml_call("net", "echo", 1, &into, 1, &out, 30));
  out = mpiml_array_c(x, MPIML_FLOAT64, 1, three);
  SAYS(MPIML_ERR_REMOTE, "ValueError: boom", mpiml_call("net", "fails", 0, NULL, 1, &out, 30));
  SAYS(MPIML_ERR_REMOTE, "TypeError", mpiml_call("net", "echo", 0, NULL, 1, &out, 30));
  SAYS(MPIML_ERR_DTYPE, "expected an array", mpiml_call("net", "text", 0, NULL, 1, &out, 30));
  SAYS(MPIML_ERR_METHOD, "\"echo\"", mpiml_call("net", "ecko", 1, &in, 1, &out, 30));
  SAYS(MPIML_ERR_METHOD, "NULL", mpiml_call("net", NULL, 1, &in, 1, &out, 30));
  SAYS(MPIML_ERR_METHOD, "stream", mpiml_call("net", "numbers", 0, NULL, 1, &out, 30));
  SAYS(MPIML_ERR_SERVICE, "given to this ExternalNode: \"net\"",
       mpiml_call("other", "echo", 1, &in, 1, &out, 30));
  SAYS(MPIML_ERR_SERVICE, "is a parameter server. Use mpiml_pull and mpiml_push",
       mpiml_call("ps", "pull", 0, NULL, 1, &out, 30));
  SAYS(MPIML_ERR_SERVICE, "is a service. Use mpiml_call", mpiml_pull("net", "v", &out, NULL));
  SAYS(MPIML_ERR_SERVICE, "replica from 0 to 0, got 7",
       mpiml_call("net/7", "echo", 1, &in, 1, &out, 30));
  SAYS(MPIML_ERR_USAGE, "nin = 33", mpiml_call("net", "echo", 33, &in, 1, &out, 30));
  SAYS(MPIML_ERR_USAGE, "NULL", mpiml_call("net", "echo", 1, NULL, 1, &out, 30));
  in.dtype = 77;
  SAYS(MPIML_ERR_DTYPE, "got 77", mpiml_call("net", "echo", 1, &in, 1, &out, 30));
}

/* A call that nobody answers in time; its answer comes later, and is no other call's. */
static void timeouts(int rank) {
  static double x[MOST / 8], y[MOST / 8];
  const int64_t shape[1] = {MOST / 8};
  for (int i = 0; i < MOST / 8; ++i) x[i] = i;
  mpiml_array in = mpiml_array_c(x, MPIML_FLOAT64, 1, shape);
  mpiml_array out = mpiml_array_c(y, MPIML_FLOAT64, 1, shape);
  double number = rank;
  mpiml_array who = mpiml_array_c(&number, MPIML_FLOAT64, 0, NULL);
  mpiml_array held[2] = {who, in};
  SAYS(MPIML_ERR_TIMEOUT, "within 0.05 s", mpiml_call("net", "hold", 2, held, 1, &out, 0.05));
  CHECK(y[1] == 0);
  GIVES(MPIML_OK, mpiml_call("net", "release", 1, &who, 0, NULL, 30));
  for (int i = 0; i < 3; ++i) {
    y[7] = 0;
    GIVES(MPIML_OK, mpiml_call("net", "echo", 1, &in, 1, &out, 30));
    CHECK(y[7] == 7);
  }
}

static void parameters(void) {
  float w[6] = {0}, gradient[6] = {1, 1, 1, 1, 1, 1}, bias[3] = {9, 9, 9};
  const int64_t shape[2] = {2, 3}, three[1] = {3};
  mpiml_array into = mpiml_array_c(w, MPIML_FLOAT32, 2, shape);
  mpiml_array step = mpiml_array_f(gradient, MPIML_FLOAT32, 2, shape);
  mpiml_array other = mpiml_array_c(bias, MPIML_FLOAT32, 1, three);
  int64_t version = -1, after = -1;
  GIVES(MPIML_OK, mpiml_pull("ps", "layers/one", &into, &version));
  CHECK(version >= 0);
  GIVES(MPIML_OK, mpiml_pull("ps", "bias", &other, &version));
  CHECK(bias[0] == 0);
  GIVES(MPIML_OK, mpiml_push("ps", "layers/one", &step, version));
  while (after <= version) GIVES(MPIML_OK, mpiml_pull("ps", "layers/one", &into, &after));
  CHECK(w[0] < 0 && w[5] == w[0]);
  SAYS(MPIML_ERR_SHAPE, "got (2, 3)", mpiml_pull("ps", "layers/one", &other, &version));
  SAYS(MPIML_ERR_METHOD, "layers/two", mpiml_pull("ps", "layers/two", &into, &version));
  SAYS(MPIML_ERR_SERVICE, "\"ps\"", mpiml_pull("other", "w", &into, &version));
  SAYS(MPIML_ERR_SERVICE, "\"ps\"", mpiml_push("q", "w", &into, 0));
  SAYS(MPIML_ERR_USAGE, "version", mpiml_pull("ps", "bias", &other, NULL));
  SAYS(MPIML_ERR_USAGE, "NULL", mpiml_push("ps", NULL, &other, 0));
  GIVES(MPIML_ERR_SHAPE, mpiml_push("ps", "layers/one", &other, version));
}

int main(int argc, char **argv) {
  MPI_Init(&argc, &argv);
  MPI_Comm own;
  GIVES(MPIML_OK, mpiml_attach(MPI_COMM_WORLD, "solver", &own));
  int rank;
  MPI_Comm_rank(own, &rank);
  all_dtypes();
  orders();
  strides();
  several();
  refused();
  timeouts(rank);
  parameters();
  MPI_Barrier(own);
  if (rank == 0) printf("all calls are right\n");
  GIVES(MPIML_OK, mpiml_leave());
  MPI_Comm_free(&own);
  MPI_Finalize();
  return 0;
}
