/* ends.c: how programs of ranks of C end, one way for each argument; see ends.py. */
#include "checks.h"

#include <sched.h>

#ifdef OTHER_LIBRARY /* stands before that of MPI for the library, too */
int MPI_Get_library_version(char *version, int *length) {
  strcpy(version, "Other MPI v1.0, package: none");
  *length = (int)strlen(version);
  return MPI_SUCCESS;
}
#endif

#ifdef OTHER_VERSION /* what this rank tells of itself is changed on its way */
int MPI_Allgather(const void *from, int n, MPI_Datatype type, void *to, int m, MPI_Datatype other,
                  MPI_Comm comm) {
  char record[512];
  memcpy(record, from, sizeof record);
  strcpy(record + 412, "9.9.9");
  return PMPI_Allgather(record, n, type, to, m, other, comm);
}
#endif

#ifdef LATE /* what comes in is not seen for a while, as on a slow network */
static int coming; /* receives into memory of the caller that are not seen to have ended */
static double hold_until;

int MPI_Irecv(void *to, int n, MPI_Datatype type, int from, int tag, MPI_Comm comm,
              MPI_Request *request) {
  ++coming;
  hold_until = MPI_Wtime() + 1.0;
  return PMPI_Irecv(to, n, type, from, tag, comm, request);
}

int MPI_Testsome(int n, MPI_Request *requests, int *ended, int *which, MPI_Status *statuses) {
  *ended = 0;
  if (coming && MPI_Wtime() < hold_until) return MPI_SUCCESS;
  int code = PMPI_Testsome(n, requests, ended, which, statuses);
  if (coming && *ended > 0) coming = 0; /* there is one, and nothing is sent meanwhile */
  return code;
}
#else
static int coming;
#endif

static MPI_Comm own;
static int rank, size;
static double number;
static mpiml_array one;

static void before(void) {
  int flag = 7;
  int64_t version = 7;
  MPI_Comm none;
  SAYS(MPIML_ERR_NOT_ATTACHED, "mpiml_attach", mpiml_publish("numbers", &one));
  GIVES(MPIML_ERR_NOT_ATTACHED, mpiml_newest("numbers", &one, &version));
  GIVES(MPIML_ERR_NOT_ATTACHED, mpiml_call("net", "hold", 0, NULL, 0, NULL, 1));
  GIVES(MPIML_ERR_NOT_ATTACHED, mpiml_pull("ps", "", &one, &version));
  GIVES(MPIML_ERR_NOT_ATTACHED, mpiml_push("ps", "", &one, 0));
  GIVES(MPIML_ERR_NOT_ATTACHED, mpiml_poll());
  GIVES(MPIML_ERR_NOT_ATTACHED, mpiml_stopping(&flag));
  GIVES(MPIML_ERR_NOT_ATTACHED, mpiml_stop());
  GIVES(MPIML_ERR_NOT_ATTACHED, mpiml_leave());
  CHECK(flag == 7 && version == 7);
  SAYS(MPIML_ERR_USAGE, "label", mpiml_attach(MPI_COMM_SELF, NULL, &none));
  SAYS(MPIML_ERR_USAGE, "43 bytes",
       mpiml_attach(MPI_COMM_SELF, "a label that is longer than any label may be", &none));
  SAYS(MPIML_ERR_USAGE, "UTF-8", mpiml_attach(MPI_COMM_SELF, "caf\xe9", &none));
  SAYS(MPIML_ERR_USAGE, "NULL", mpiml_attach(MPI_COMM_SELF, "solver", NULL));
  SAYS(MPIML_ERR_USAGE, "COMM_NULL", mpiml_attach(MPI_COMM_NULL, "solver", &none));
  CHECK(strcmp(mpiml_version(), MPIML_VERSION) == 0);
}

static void after(void) {
  int flag = 7;
  MPI_Comm none;
  SAYS(MPIML_ERR_LEFT, "mpiml_leave", mpiml_publish("numbers", &one));
  GIVES(MPIML_ERR_LEFT, mpiml_call("net", "hold", 0, NULL, 0, NULL, 1));
  GIVES(MPIML_ERR_LEFT, mpiml_stopping(&flag));
  GIVES(MPIML_ERR_LEFT, mpiml_leave());
  SAYS(MPIML_ERR_USAGE, "has left", mpiml_attach(MPI_COMM_WORLD, "solver", &none));
}

/* After a stop everything says so, and waits end. */
static void stopped(void) {
  int64_t version = 0;
  int flag = 0;
  GIVES(MPIML_STOPPED, mpiml_publish("numbers", &one));
  SAYS(MPIML_STOPPED, "mpiml_leave", mpiml_newest("numbers", &one, &version));
  GIVES(MPIML_STOPPED, mpiml_call("net", "hold", 0, NULL, 0, NULL, 0));
  GIVES(MPIML_STOPPED, mpiml_pull("ps", "", &one, &version));
  GIVES(MPIML_OK, mpiml_stopping(&flag));
  CHECK(flag == 1);
  GIVES(MPIML_OK, mpiml_poll());
  GIVES(MPIML_OK, mpiml_stop());
}

static void stop(void) {
  int flag = 0;
  MPI_Comm none;
  SAYS(MPIML_ERR_USAGE, "is attached", mpiml_attach(MPI_COMM_WORLD, "solver", &none));
  GIVES(MPIML_OK, mpiml_stopping(&flag));
  CHECK(flag == 0);
  SAYS(MPIML_ERR_USAGE, "NULL", mpiml_stopping(NULL));
  MPI_Barrier(own);
  if (rank == 0) GIVES(MPIML_OK, mpiml_stop());
  while (!flag) {
    GIVES(MPIML_OK, mpiml_stopping(&flag));
    sched_yield();
  }
  stopped();
}

/* A wait in a call, in a publish, that only a stop ends. The method may return at a stop, too. */
static void wait_for_stop(int expected) {
  int code = MPIML_OK;
  while (code == MPIML_OK)
    code = rank == 0 ? mpiml_call("net", "hold", 0, NULL, 0, NULL, 0)
                     : mpiml_publish("numbers", &one);
  GIVES(expected, code);
  if (expected == MPIML_ERR_FAILED) { /* the reason first, and all of it that is of use */
    CHECK(strstr(mpiml_error(), "the program has failed: ValueError: boom\n"));
    CHECK(strstr(mpiml_error(), "in listen"));
  }
}

/* The program fails, or the time ends, while an answer comes in: not before MPI is done with its
 * memory does the call return. */
static void late(int failing) {
  enum { MANY = 100000 };
  static double x[MANY];
  const int64_t many[1] = {MANY};
  mpiml_array into = mpiml_array_c(x, MPIML_FLOAT64, 1, many);
  int code = mpiml_call("net", failing ? "last" : "large", 0, NULL, 1, &into, failing ? 0 : 0.5);
  CHECK(coming == 0);
  if (!failing) CHECK(code == MPIML_OK || code == MPIML_ERR_TIMEOUT);
  if (failing) GIVES(MPIML_ERR_FAILED, code);
  if (!failing) CHECK(mpiml_call("net", "large", 0, NULL, 1, &into, 0) == MPIML_OK && x[7] == 7);
}

int main(int argc, char **argv) {
  const char *how = argc > 1 ? argv[1] : "";
  const char *label = strcmp(how, "label") == 0 ? "nobody" : "solver";
  one = mpiml_array_c(&number, MPIML_FLOAT64, 0, NULL);
  if (strcmp(how, "stop") == 0)
    SAYS(MPIML_ERR_USAGE, "MPI_Init", mpiml_attach(MPI_COMM_WORLD, "solver", &own));
  MPI_Init(&argc, &argv);
  if (strcmp(how, "stop") == 0) before();
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  if (strcmp(how, "wrong") == 0 && rank == 1)
    label = "a label that is longer than any label may be";
  int code = mpiml_attach(MPI_COMM_WORLD, label, &own);
  if (code != MPIML_OK) { /* what is refused is refused on all ranks */
    printf("code %d: %s\n", code, mpiml_error());
    MPI_Finalize();
    return 0;
  }
  MPI_Comm_rank(own, &rank);
  MPI_Comm_size(own, &size);
  if (strcmp(how, "abort") == 0 && rank == 1) MPI_Abort(MPI_COMM_WORLD, 5);
  if (strcmp(how, "exit") == 0 && rank == 1) exit(4);
  if (strcmp(how, "stop") == 0) stop();
  if (strcmp(how, "stopped") == 0) wait_for_stop(MPIML_STOPPED);
  if (strcmp(how, "fails") == 0) wait_for_stop(MPIML_ERR_FAILED);
  if (strcmp(how, "late") == 0) late(0);
  if (strcmp(how, "lost") == 0) late(1);
  if (strcmp(how, "abort") == 0 || strcmp(how, "exit") == 0) wait_for_stop(MPIML_ERR_FAILED);
  number = rank;
  if (strcmp(how, "early") == 0 && rank == 1) /* the others go on without it */
    for (int i = 0; i < 5; ++i) GIVES(MPIML_OK, mpiml_publish("numbers", &one));
  if (strcmp(how, "forgets") != 0) {
    int failed = strcmp(how, "fails") == 0 || strcmp(how, "lost") == 0;
    GIVES(failed ? MPIML_ERR_FAILED : MPIML_OK, mpiml_leave());
    after();
    if (strcmp(how, "early") == 0) MPI_Barrier(own); /* it is still the solver's */
    MPI_Comm_free(&own);
  }
  printf("rank %d: %s: done\n", rank, how);
  MPI_Finalize();
  return 0;
}
