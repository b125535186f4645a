/* topics.c: arrays out and in on topics of each policy, by two ranks; see topics.py. */
#include "checks.h"

#include <sched.h>

enum { ROWS = 150, COLUMNS = 100, MANY = 60 };

static double x[ROWS * COLUMNS], y[ROWS * COLUMNS];

/* Waits until the newest array has at least a version; returns it. */
static int64_t newest(const char *topic, mpiml_array *into, int64_t least) {
  int64_t version = 0;
  while (version < least) {
    GIVES(MPIML_OK, mpiml_newest(topic, into, &version));
    sched_yield();
  }
  return version;
}

static void fill(int number) {
  for (int i = 0; i < ROWS * COLUMNS; ++i) x[i] = number + 1e-6 * i;
}

/* None is lost, and each is as it was when it was published: small, large, turned, a view. */
static void publish_all(int rank) {
  for (int number = 0; number < MANY; ++number) {
    fill(1000 * rank + number);
    const int64_t small[2] = {3, 4}, large[2] = {ROWS, COLUMNS}, view[2] = {ROWS / 2, COLUMNS};
    mpiml_array array = number % 4 == 0   ? mpiml_array_c(x, MPIML_FLOAT64, 2, small)
                        : number % 4 == 1 ? mpiml_array_c(x, MPIML_FLOAT64, 2, large)
                        : number % 4 == 2 ? mpiml_array_f(x, MPIML_FLOAT64, 2, large)
                                          : mpiml_array_c(x, MPIML_FLOAT64, 2, view);
    if (number % 4 == 3) { /* every second row */
      array.strides[0] = 2 * COLUMNS * (int64_t)sizeof(double);
      array.strides[1] = (int64_t)sizeof(double);
    }
    GIVES(MPIML_OK, mpiml_publish("fields", &array));
    fill(-1); /* it was captured */
    GIVES(MPIML_OK, mpiml_publish("latest", &array));
    if (number == MANY - 1) fill(1000 * rank + number);
    GIVES(MPIML_OK, mpiml_publish("drops", &array));
  }
  int32_t job = 0;
  mpiml_array one = mpiml_array_c(&job, MPIML_INT32, 0, NULL);
  for (job = 0; job < 20; ++job) GIVES(MPIML_OK, mpiml_publish("jobs", &one));
}

static void take_newest(void) {
  const int64_t shape[2] = {ROWS, COLUMNS}, other[2] = {COLUMNS, ROWS};
  mpiml_array into = mpiml_array_c(y, MPIML_FLOAT64, 2, shape);
  int32_t go = 0;
  mpiml_array ask = mpiml_array_c(&go, MPIML_INT32, 0, NULL);
  int64_t version = -1;
  GIVES(MPIML_OK, mpiml_newest("params", &into, &version));
  CHECK(version == 0); /* nothing is published before `go` */
  for (go = 1; go <= 4; ++go) { /* C order, F order, a view, all in turn into each memory */
    GIVES(MPIML_OK, mpiml_publish("go", &ask));
    into = go % 2 ? mpiml_array_c(y, MPIML_FLOAT64, 2, shape)
                  : mpiml_array_f(y, MPIML_FLOAT64, 2, shape);
    CHECK(newest("params", &into, go) == go);
    for (int i = 0; i < ROWS; ++i)
      for (int j = 0; j < COLUMNS; ++j)
        CHECK((go % 2 ? y[i * COLUMNS + j] : y[i + j * ROWS]) == 1e4 * go + 100 * i + j);
    y[0] = -7;
    GIVES(MPIML_OK, mpiml_newest("params", &into, &version)); /* nothing new: untouched */
    CHECK(version == go && y[0] == -7);
  }
  /* what does not fit is there for another try */
  GIVES(MPIML_OK, mpiml_publish("go", &ask));
  mpiml_array wrong = mpiml_array_c(y, MPIML_FLOAT64, 2, other);
  version = 4;
  int code = MPIML_OK;
  while (code == MPIML_OK) code = mpiml_newest("params", &wrong, &version);
  CHECK(code == MPIML_ERR_SHAPE && version == 4);
  CHECK(strstr(mpiml_error(), "expected shape (100, 150), that of your memory, got (150, 100)"));
  wrong = mpiml_array_c(y, MPIML_INT64, 2, shape);
  SAYS(MPIML_ERR_DTYPE, "got float64", mpiml_newest("params", &wrong, &version));
  into = mpiml_array_c(y, MPIML_FLOAT64, 2, shape);
  CHECK(newest("params", &into, 5) == 5);
  CHECK(y[1] == 1e4 * 5 + 1);
}

static void take_small(void) {
  int64_t numbers[2] = {0, 0}, version = 0;
  const int64_t two[1] = {2};
  mpiml_array into = mpiml_array_c(numbers, MPIML_INT64, 1, two);
  newest("kept", &into, 10); /* Keep(3) by two publishers: each waits until its arrays are taken */
  while (version < 20) {
    GIVES(MPIML_OK, mpiml_newest("kept", &into, &version));
    CHECK(numbers[1] >= 1 && numbers[1] <= 10);
    sched_yield();
  }
  CHECK(version == 20);
}

static void refused(void) {
  float f[2] = {0};
  int64_t version = 0;
  const int64_t two[1] = {2}, wide[2] = {2, 1};
  mpiml_array array = mpiml_array_c(f, MPIML_FLOAT32, 1, two);
  SAYS(MPIML_ERR_TOPIC, "\"params\"", mpiml_publish("parms", &array));
  SAYS(MPIML_ERR_TOPIC, "publisher", mpiml_publish("params", &array));
  SAYS(MPIML_ERR_TOPIC, "subscriber", mpiml_newest("fields", &array, &version));
  SAYS(MPIML_ERR_TOPIC, "NULL", mpiml_newest(NULL, &array, &version));
  SAYS(MPIML_ERR_DTYPE, "expected float64, as the topic is declared", mpiml_publish("fields", &array));
  array = mpiml_array_c(x, MPIML_FLOAT64, 1, two);
  SAYS(MPIML_ERR_SHAPE, "(-1, -1)", mpiml_publish("fields", &array));
  array = mpiml_array_c(x, MPIML_FLOAT64, 2, wide);
  array.dtype = 0;
  SAYS(MPIML_ERR_DTYPE, "got 0", mpiml_publish("fields", &array));
  SAYS(MPIML_ERR_USAGE, "NULL", mpiml_publish("fields", NULL));
  SAYS(MPIML_ERR_USAGE, "NULL", mpiml_newest("params", &array, NULL));
}

int main(int argc, char **argv) {
  MPI_Init(&argc, &argv);
  MPI_Comm own;
  GIVES(MPIML_OK, mpiml_attach(MPI_COMM_WORLD, "solver", &own));
  int rank;
  MPI_Comm_rank(own, &rank);
  refused();
  publish_all(rank);
  if (rank == 0) take_newest();
  take_small();
  if (rank == 0) printf("all topics are right\n");
  GIVES(MPIML_OK, mpiml_leave());
  MPI_Comm_free(&own);
  MPI_Finalize();
  return 0;
}
