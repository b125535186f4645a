/* external.c: what calls, publishing and streaming cost a code in C, beside raw MPI.
 *
 *     mpicc -O2 -I libmpiml/include libmpiml/bench/external.c libmpiml/src/[a-z]*.c -lm -o external
 *     mpirun -n 2 ./external raw-call 1048576
 *     mpirun -n 1 ./external call 1048576 : -n 1 python -m mpiml.run libmpiml/bench/external.py
 *
 * modes: raw-call, call BYTES; raw-publish, publish BYTES; raw-stream BYTES [ARRAYS]; stream BYTES;
 * step BYTES RATE.
 * With BENCH_QUICK in the environment there are few repetitions.
 * Rank 0 prints one line of JSON: times are medians in microseconds, rates in bytes a second.
 */
#include <mpiml.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ROUNDS = 11 };

static int rank, size;
static size_t bytes;
static char *memory, *other, *spare;
static MPI_Comm own = MPI_COMM_WORLD;
static double share = 1; /* of the repetitions */

static void must(int code) {
  if (code == MPIML_OK) return;
  fprintf(stderr, "%s\n", mpiml_error());
  MPI_Abort(MPI_COMM_WORLD, 1);
}

static int ascending(const void *a, const void *b) {
  double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

static double median(double *values, int n) {
  qsort(values, (size_t)n, sizeof *values, ascending);
  return values[n / 2];
}

static int repeats(double seconds) {
  double each = 3e-6 + (double)bytes / 2e9;
  double n = share * seconds / each;
  return n < 20 ? 20 : n > 20000 ? 20000 : (int)n;
}

/* -- calls ----------------------------------------------------------------------------- */

static void raw_round(int there, int back) {
  if (rank == 0) {
    MPI_Send(memory, there, MPI_BYTE, 1, 0, MPI_COMM_WORLD);
    MPI_Recv(other, back, MPI_BYTE, 1, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
  } else if (rank == 1) {
    MPI_Recv(memory, there, MPI_BYTE, 0, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    MPI_Send(other, back, MPI_BYTE, 0, 0, MPI_COMM_WORLD);
  }
}

static mpiml_array described(void *data) {
  const int64_t shape[1] = {(int64_t)(bytes / sizeof(double))};
  return mpiml_array_c(data, MPIML_FLOAT64, 1, shape);
}

static void call_round(const char *method) {
  mpiml_array in = described(memory), out = described(other);
  must(mpiml_call("service", method, 1, &in, strcmp(method, "echo") == 0, &out, 60));
}

static void calls(int raw) {
  int n = repeats(0.5);
  double *both = calloc((size_t)n, sizeof *both), *one = calloc((size_t)n, sizeof *one);
  if (!both || !one) MPI_Abort(MPI_COMM_WORLD, 1);
  for (int round = 0; round < 2; ++round) { /* the first one warms */
    MPI_Barrier(own);
    for (int i = 0; i < n; ++i) {
      double start = MPI_Wtime();
      if (raw) raw_round((int)bytes, (int)bytes);
      else call_round("echo");
      both[i] = MPI_Wtime() - start;
    }
    for (int i = 0; i < n; ++i) { /* apart: the other way's buffers would push these out of caches */
      double start = MPI_Wtime();
      if (raw) raw_round((int)bytes, 64);
      else call_round("take");
      one[i] = MPI_Wtime() - start;
    }
  }
  if (rank == 0)
    printf("{\"mode\": \"%s\", \"bytes\": %zu, \"there_and_back_us\": %.3f, \"there_us\": %.3f}\n",
           raw ? "raw-call" : "call", bytes, 1e6 * median(both, n), 1e6 * median(one, n));
  free(both);
  free(one);
}

/* -- publishing ------------------------------------------------------------------------ */

/* Time inside mpiml_publish on a topic that drops what does not leave, and of a plain copy. */
static void publish(void) {
  int n = repeats(0.5);
  double *put = calloc((size_t)n, sizeof *put), *copy = calloc((size_t)n, sizeof *copy);
  if (!put || !copy) MPI_Abort(MPI_COMM_WORLD, 1);
  mpiml_array x = described(memory);
  for (int round = 0; round < 2; ++round) /* the first one warms */
    for (int i = 0; i < n; ++i) {
      double start = MPI_Wtime();
      must(mpiml_publish("latest", &x));
      put[i] = MPI_Wtime() - start;
    }
  for (int i = 0; i < n; ++i) {
    double start = MPI_Wtime();
    memcpy(other, memory, bytes);
    __asm__ volatile("" : : "r"(other) : "memory");
    copy[i] = MPI_Wtime() - start;
  }
  if (rank == 0)
    printf("{\"mode\": \"publish\", \"bytes\": %zu, \"publish_us\": %.3f, \"copy_us\": %.3f}\n", bytes,
           1e6 * median(put, n), 1e6 * median(copy, n));
  free(put);
  free(copy);
}

/* What raw MPI needs for the same: a copy, a send if the last one has left, and progress. */
static void raw_publish(void) {
  int n = repeats(0.5), done = 1;
  double *put = calloc((size_t)n, sizeof *put);
  if (!put) MPI_Abort(MPI_COMM_WORLD, 1);
  MPI_Request request = MPI_REQUEST_NULL;
  for (int round = 0; round < 2 && rank == 0; ++round)
    for (int i = 0; i < n; ++i) {
      double start = MPI_Wtime();
      MPI_Test(&request, &done, MPI_STATUS_IGNORE);
      memcpy(done ? other : spare, memory, bytes);
      if (done) MPI_Isend(other, (int)bytes, MPI_BYTE, 1, 0, MPI_COMM_WORLD, &request);
      put[i] = MPI_Wtime() - start;
    }
  if (rank == 0) {
    MPI_Wait(&request, MPI_STATUS_IGNORE);
    MPI_Send(other, 0, MPI_BYTE, 1, 0, MPI_COMM_WORLD);
    printf("{\"mode\": \"raw-publish\", \"bytes\": %zu, \"publish_us\": %.3f}\n", bytes,
           1e6 * median(put, n));
  } else {
    MPI_Status status;
    for (int got = 1; got > 0;) {
      MPI_Recv(memory, (int)bytes, MPI_BYTE, 0, 0, MPI_COMM_WORLD, &status);
      MPI_Get_count(&status, MPI_BYTE, &got);
    }
  }
  free(put);
}

/* -- streaming ------------------------------------------------------------------------- */

/* All ranks but the last send to the last: always the same array, or several in turn, since one
 * that is under way must not be overwritten. One array stays in the cache of a core. */
static void raw_stream(int arrays) {
  int n = repeats(1.0);
  char *turns = calloc((size_t)arrays, bytes);
  if (!turns) MPI_Abort(MPI_COMM_WORLD, 1);
  memset(turns, 1, (size_t)arrays * bytes);
  double rates[ROUNDS];
  for (int round = -2; round < ROUNDS; ++round) {
    MPI_Barrier(MPI_COMM_WORLD);
    double start = MPI_Wtime();
    if (rank < size - 1) {
      for (int i = 0; i < n; ++i)
        MPI_Send(turns + (size_t)(i % arrays) * bytes, (int)bytes, MPI_BYTE, size - 1, 0,
                 MPI_COMM_WORLD);
    } else {
      for (int i = 0; i < n * (size - 1); ++i)
        MPI_Recv(turns + (size_t)(i % arrays) * bytes, (int)bytes, MPI_BYTE, MPI_ANY_SOURCE, 0,
                 MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    }
    MPI_Barrier(MPI_COMM_WORLD);
    if (round >= 0) rates[round] = (double)n * (size - 1) * (double)bytes / (MPI_Wtime() - start);
  }
  if (rank == 0)
    printf("{\"mode\": \"raw-stream\", \"bytes\": %zu, \"arrays\": %d, \"rate\": %.0f}\n", bytes,
           arrays, median(rates, ROUNDS));
  free(turns);
}

/* Each round ends when the reader has taken all: it says so on "done". */
static void stream(void) {
  int n = repeats(1.0);
  double rates[ROUNDS], number = n * size;
  mpiml_array x = described(memory);
  mpiml_array announced = mpiml_array_c(&number, MPIML_FLOAT64, 0, NULL);
  int64_t version = 0;
  for (int round = -2; round < ROUNDS; ++round) {
    MPI_Barrier(own);
    double start = MPI_Wtime();
    if (rank == 0) must(mpiml_publish("rounds", &announced));
    for (int i = 0; i < n; ++i) must(mpiml_publish("stream", &x));
    while (version < round + 3) must(mpiml_newest("done", &announced, &version));
    MPI_Barrier(own);
    number = n * size;
    if (round >= 0) rates[round] = (double)n * size * (double)bytes / (MPI_Wtime() - start);
  }
  if (rank == 0)
    printf("{\"mode\": \"stream\", \"bytes\": %zu, \"rate\": %.0f}\n", bytes, median(rates, ROUNDS));
}

/* -- a solver's step ------------------------------------------------------------------- */

static volatile double sink;

static void compute(double seconds) {
  double end = MPI_Wtime() + seconds, x = 1;
  while (MPI_Wtime() < end)
    for (int i = 0; i < 200; ++i) x = x * 1.0000001 + 1e-9;
  sink = x;
}

/* Publishes at a rate (bytes a second, of all ranks together), and tells which share of each
 * step is spent inside mpiml_*. */
static void step(double rate) {
  double pause = (double)bytes * size / rate, inside = 0;
  int n = (int)(1 + share * 3.0 / pause);
  double number = (double)n * size;
  mpiml_array x = described(memory);
  mpiml_array announced = mpiml_array_c(&number, MPIML_FLOAT64, 0, NULL);
  int64_t version = 0;
  if (rank == 0) must(mpiml_publish("rounds", &announced));
  double start = MPI_Wtime();
  for (int i = 0; i < n; ++i) {
    int stop = 0;
    compute(pause);
    double before = MPI_Wtime();
    must(mpiml_publish("stream", &x));
    must(mpiml_stopping(&stop));
    inside += MPI_Wtime() - before;
  }
  double all = MPI_Wtime() - start;
  while (version < 1) must(mpiml_newest("done", &announced, &version));
  if (rank == 0)
    printf("{\"mode\": \"step\", \"bytes\": %zu, \"steps\": %d, \"step_us\": %.1f, \"inside_us\": %.2f, "
           "\"share\": %.5f}\n",
           bytes, n, 1e6 * all / n, 1e6 * inside / n, inside / all);
}

int main(int argc, char **argv) {
  MPI_Init(&argc, &argv);
  const char *mode = argc > 1 ? argv[1] : "";
  int raw = strncmp(mode, "raw-", 4) == 0;
  bytes = argc > 2 ? strtoul(argv[2], NULL, 10) : 1 << 20;
  if (getenv("BENCH_QUICK")) share = 0.02;
  memory = calloc(bytes + 1024, 1);
  other = calloc(bytes + 1024, 1);
  spare = calloc(bytes + 1024, 1);
  if (!memory || !other || !spare) MPI_Abort(MPI_COMM_WORLD, 1);
  memset(memory, 1, bytes);
  memset(other, 1, bytes);
  if (!raw) must(mpiml_attach(MPI_COMM_WORLD, "solver", &own));
  MPI_Comm_rank(own, &rank);
  MPI_Comm_size(own, &size);
  if (strcmp(mode + (raw ? 4 : 0), "call") == 0) calls(raw);
  else if (strcmp(mode, "publish") == 0) publish();
  else if (strcmp(mode, "raw-publish") == 0) raw_publish();
  else if (strcmp(mode, "raw-stream") == 0) raw_stream(argc > 3 ? atoi(argv[3]) : 1);
  else if (strcmp(mode, "stream") == 0) stream();
  else if (strcmp(mode, "step") == 0 && argc > 3) step(strtod(argv[3], NULL));
  else if (rank == 0) fprintf(stderr, "expected a mode; see the top of external.c\n");
  if (!raw) {
    must(mpiml_leave());
    MPI_Comm_free(&own);
  }
  MPI_Finalize();
  return 0;
}
