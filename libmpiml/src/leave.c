/* leave.c: stop and leaving: what is under way is seen to its end, and everybody is told.
 *
 * A code may forget to leave. MPI_Finalize deletes the attributes of MPI_COMM_SELF first, while
 * MPI still works, so one of ours leaves then.
 */
#include "leave.h"

#include "errors.h"
#include "link.h"
#include "mpi_error.h"
#include "state.h"
#include "topics.h"

#include <math.h>
#include <stdlib.h>

static const double AFTER_FAILURE = 10.0; /* seconds for goodbyes to a program that has failed */
static int key = MPI_KEYVAL_INVALID;
static int awaited; /* goodbyes of partners that are still to come; the keeper's not counted */
static bool keeper_gone;

void mi_on_gone(int rank) {
  if (rank == mi.keeper) keeper_gone = true;
  else --awaited;
}

static bool partners_gone(void *unused) {
  (void)unused;
  return awaited <= 0;
}

static bool all_gone(void *unused) {
  (void)unused;
  return keeper_gone;
}

static bool still(void *unused) {
  (void)unused;
  return mi_moving() == 0;
}

static int say_goodbye(int rank) {
  unsigned char how = mi.stop == MPIML_OK ? 0 : mi.stop == MPIML_STOPPED ? 1 : 2;
  mi_frame frame = {
      .kind = MI_GUEST_LEAVE, .source = mi.program.vertex, .body = &how, .body_size = 1};
  return mi_send(rank, &frame, NULL, NULL, NULL);
}

/* A program that has failed may not answer any more. */
static double limit(void) {
  return mi.stop == MPIML_ERR_FAILED ? mi_now() + AFTER_FAILURE : INFINITY;
}

/* Waits for `ready`, also when the program fails meanwhile. */
static int wait_for(bool (*ready)(void *)) {
  int code = MPIML_OK;
  if (mi.stop != MPIML_ERR_FAILED) code = mi_wait(ready, NULL, INFINITY, MI_BY_FAILURE);
  if (mi.stop == MPIML_ERR_FAILED) code = mi_wait(ready, NULL, limit(), MI_BY_NOTHING);
  return code;
}

static int say_all(void) {
  int code = mi_topics_leave(mi.stop != MPIML_OK);
  awaited = 0;
  for (int i = 0; i < mi.npartners && code == MPIML_OK; ++i) {
    if (mi.partners[i] == mi.keeper) continue;
    ++awaited;
    code = say_goodbye(mi.partners[i]);
  }
  if (code == MPIML_OK) code = wait_for(partners_gone);
  if (code == MPIML_OK) code = say_goodbye(mi.keeper);
  if (code == MPIML_OK) code = wait_for(all_gone);
  if (code == MPIML_OK) code = wait_for(still);
  return code;
}

void mi_forget(void) {
  mi_manifest_clear(&mi.program);
  free(mi.partners);
  mi.partners = NULL;
  mi.npartners = 0;
  mi_bells_close();
}

static int leave(void) {
  int code = mi_poll();
  if (code == MPIML_OK) {
    code = mi_wait(mi_topics_sent, NULL, INFINITY, MI_BY_STOP);
    if (mi.stop) code = MPIML_OK;
  }
  mi.phase = MI_LEAVING;
  if (code == MPIML_OK) code = say_all();
  mi.phase = MI_LEFT;
  if (code == MPIML_ERR_TIMEOUT) code = MPIML_OK; /* the failure itself is told below */
  else if (code == MPIML_OK) code = mi_link_close();
  if (code == MPIML_OK && mi.stop == MPIML_ERR_FAILED) code = mi_stopped();
  mi_forget();
  return code;
}

int mpiml_leave(void) {
  mi_at("mpiml_leave", NULL, NULL);
  if (mi.phase == MI_BEFORE)
    return mi_fail(MPIML_ERR_NOT_ATTACHED, "expected to be called after mpiml_attach");
  if (mi.phase != MI_ATTACHED)
    return mi_fail(MPIML_ERR_LEFT, "expected to be called once: this rank has left");
  int code = leave();
  if (key != MPI_KEYVAL_INVALID) {
    MPI_Comm_delete_attr(MPI_COMM_SELF, key);
    MPI_Comm_free_keyval(&key);
  }
  return code;
}

static int at_the_end(MPI_Comm comm, int keyval, void *value, void *unused) {
  (void)comm, (void)keyval, (void)value, (void)unused;
  mi_at("MPI_Finalize", NULL, NULL);
  if (mi.phase == MI_ATTACHED) leave();
  return MPI_SUCCESS;
}

int mi_leave_at_the_end(void) {
  int code = mi_mpi("MPI_Comm_create_keyval",
                    MPI_Comm_create_keyval(MPI_COMM_NULL_COPY_FN, at_the_end, &key, NULL));
  if (code != MPIML_OK) return code;
  return mi_mpi("MPI_Comm_set_attr", MPI_Comm_set_attr(MPI_COMM_SELF, key, NULL));
}

/* -- stop ------------------------------------------------------------------------------ */

int mpiml_poll(void) {
  mi_at("mpiml_poll", NULL, NULL);
  return mi_enter(true);
}

int mpiml_stopping(int *flag) {
  mi_at("mpiml_stopping", NULL, NULL);
  int code = mi_enter(true);
  if (code != MPIML_OK) return code;
  if (!flag) return mi_fail(MPIML_ERR_USAGE, "expected memory for the flag, got NULL");
  *flag = mi.stop != MPIML_OK;
  return mi.stop == MPIML_ERR_FAILED ? mi_stopped() : MPIML_OK;
}

int mpiml_stop(void) {
  enum { REQUESTED = 1, NOTE = 256 };
  mi_at("mpiml_stop", NULL, NULL);
  int code = mi_enter(true);
  if (code != MPIML_OK || mi.stop) return code;
  unsigned char note[NOTE];
  mi_frame frame = {.kind = MI_STOP_REQUEST, .source = mi.program.vertex, .body = note};
  frame.body_size = mi_note_write(note, REQUESTED, 0, mi.program.vertex, (uint32_t)mi.rank,
                                  "mpiml_stop() was called");
  return mi_send(mi.keeper, &frame, NULL, NULL, NULL);
}
