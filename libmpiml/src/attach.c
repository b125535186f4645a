/* attach.c: how ranks become nodes: the handshake of docs/design/0008-external.md.
 *
 * Every rank decides by itself whether to go on, from the same records, so all refuse or none.
 */
#include "errors.h"
#include "leave.h"
#include "link.h"
#include "mpi_error.h"
#include "record.h"
#include "state.h"
#include "topics.h"

#include <limits.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
  MPI_Comm given, link, own;
  const char *label;
  bool open;        /* the link is in use */
  bool welcome;     /* there is a program, and this rank belongs to it */
  int refused;      /* the code of wrong arguments */
  int root, colour; /* the lowest Python rank; 1 + number of the label */
} joining;

/* Whether there is anybody to attach to; if not, nobody is told. */
static int ready(MPI_Comm comm) {
  int on = 0, off = 0, inter = 0;
  MPI_Initialized(&on);
  MPI_Finalized(&off);
  if (!on || off)
    return mi_fail(MPIML_ERR_USAGE, "expected MPI to be running. Call it after MPI_Init and before "
                                    "MPI_Finalize.");
  if (mi.phase != MI_BEFORE)
    return mi_fail(MPIML_ERR_USAGE, "expected to be called once for each process: this one %s",
                   mi.phase == MI_ATTACHED ? "is attached" : "has left");
  if (comm == MPI_COMM_NULL)
    return mi_fail(MPIML_ERR_USAGE, "expected a communicator, got MPI_COMM_NULL");
  int code = mi_mpi("MPI_Comm_test_inter", MPI_Comm_test_inter(comm, &inter));
  if (code != MPIML_OK) return code;
  if (inter) return mi_fail(MPIML_ERR_USAGE, "expected an intracommunicator");
  return MPIML_OK;
}

/* Whether the other arguments are right; if not, all others wait to hear of it. */
static int usage(const char *label, const MPI_Comm *own) {
  if (!mi_label_good(label))
    return mi_fail(MPIML_ERR_USAGE, "expected a label of 1 to %d bytes of UTF-8, that of an "
                                    "ExternalNode", MI_LABEL);
  if (!own) return mi_fail(MPIML_ERR_USAGE, "expected memory for the communicator, got NULL");
  return MPIML_OK;
}

/* Exchanges records, decides, and finds this rank's place among them. */
static int meet(joining *j) {
  unsigned char own[MI_RECORD];
  mi_record_write(own, j->refused == MPIML_OK ? j->label : NULL);
  unsigned char *all = malloc((size_t)mi.size * MI_RECORD);
  if (!all) return mi_fail(MPIML_ERR_MEMORY, "no memory for %d records", mi.size);
  int code = mi_mpi("MPI_Allgather", MPI_Allgather(own, MI_RECORD, MPI_BYTE, all, MI_RECORD,
                                                   MPI_BYTE, j->given));
  if (code == MPIML_OK) code = j->refused;
  if (code == MPIML_OK) code = mi_records_check(all, mi.size, mi.rank);
  if (code == MPIML_OK) {
    mi_place place = mi_records_place(all, mi.size, mi.rank);
    j->root = place.root;
    j->colour = 1 + place.label;
    mi.index = place.index;
    mi.keeper = place.keeper;
  }
  free(all);
  return code;
}

static int split(joining *j) {
  int code = mi_mpi("MPI_Comm_split", MPI_Comm_split(j->given, 0, mi.rank, &j->link));
  if (code == MPIML_OK)
    code = mi_mpi("MPI_Comm_split", MPI_Comm_split(j->given, j->colour, mi.rank, &j->own));
  if (code == MPIML_OK)
    code = mi_mpi("MPI_Comm_set_errhandler",
                  MPI_Comm_set_errhandler(j->link, MPI_ERRORS_RETURN));
  return code;
}

/* Receives what the Python ranks made of it: the manifest, or the text of their error. */
static int hear(joining *j) {
  enum { HEAD = 16 };
  unsigned char head[HEAD];
  int code = mi_mpi("MPI_Bcast", MPI_Bcast(head, HEAD, MPI_BYTE, j->root, j->link));
  if (code != MPIML_OK) return code;
  if (head[0] != 1)
    return mi_fail(MPIML_ERR_VERSION, "expected an answer of version 1, got %d", head[0]);
  int answer = (int)(int32_t)mi_get(head + 4, 4);
  size_t length = (size_t)mi_get(head + 8, 8);
  unsigned char *bytes = calloc(length + 1, 1);
  if (!bytes || length > INT_MAX) MPI_Abort(j->given, 1); /* all others take it, and go on */
  if (length)
    code = mi_mpi("MPI_Bcast", MPI_Bcast(bytes, (int)length, MPI_BYTE, j->root, j->link));
  j->welcome = code == MPIML_OK && answer == MPIML_OK;
  if (code == MPIML_OK && answer != MPIML_OK)
    code = mi_fail(answer < 0 || answer > MPIML_ERR_MEMORY ? MPIML_ERR_ATTACH : answer, "%s",
                   (const char *)bytes);
  if (code == MPIML_OK)
    code = mi_manifest_read(&mi.program, bytes, length, j->label, mi.index);
  free(bytes);
  return code;
}

/* Those who are told when this rank leaves: who hears it, and whom it hears. */
static int find_partners(void) {
  int code = mi_partner(mi.keeper);
  for (int i = 0; i < mi.program.ntopics; ++i) {
    const mi_topic *topic = &mi.program.topics[i];
    for (int k = 0; k < topic->nways && code == MPIML_OK; ++k)
      code = mi_partner(topic->ways[k].rank);
    for (int k = 0; k < topic->nheard && code == MPIML_OK; ++k)
      code = mi_partner(topic->heard[k].rank);
  }
  return code;
}

/* Makes what a node needs of its own. */
static int settle(joining *j) {
  mi_bells_open();
  j->open = true;
  int code = mi_link_open(j->link);
  if (code == MPIML_OK) code = find_partners();
  if (code == MPIML_OK) code = mi_leave_at_the_end();
  return code;
}

/* Lets all others begin, or none: one that could not settle would never answer. */
static int begin(joining *j, int code) {
  int failed = code == MPIML_OK ? 0 : 1 + mi.rank, last = 0;
  int all = MPI_Allreduce(&failed, &last, 1, MPI_INT, MPI_MAX, j->link);
  if (code != MPIML_OK) return code;
  code = mi_mpi("MPI_Allreduce", all);
  if (code == MPIML_OK && last > 0)
    code = mi_fail(MPIML_ERR_ATTACH, "rank %d could not attach: its own error says why", last - 1);
  return code;
}

static int join(joining *j) {
  int code = meet(j);
  if (code == MPIML_OK) code = split(j);
  if (code == MPIML_OK) code = hear(j);
  if (!j->welcome) return code;
  if (code == MPIML_OK) code = settle(j);
  return begin(j, code);
}

/* Undoes what there is of an attach that failed. */
static void undo(joining *j) {
  if (j->own != MPI_COMM_NULL) MPI_Comm_free(&j->own);
  if (j->open) mi_link_close();
  else if (j->link != MPI_COMM_NULL && !mi.broken) MPI_Comm_free(&j->link);
  mi_forget();
  mi.broken = MPIML_OK;
}

/* The whole of it, with MPI's errors returned. */
static int attach(joining *j, MPI_Errhandler handler, MPI_Comm *own) {
  int code = mi_mpi("MPI_Comm_rank", MPI_Comm_rank(j->given, &mi.rank));
  if (code == MPIML_OK) code = mi_mpi("MPI_Comm_size", MPI_Comm_size(j->given, &mi.size));
  if (code == MPIML_OK) {
    mi_errors_set_rank(mi.rank);
    j->refused = usage(j->label, own);
    code = join(j);
  }
  if (code == MPIML_OK)
    code = mi_mpi("MPI_Comm_set_errhandler", MPI_Comm_set_errhandler(j->own, handler));
  if (code != MPIML_OK) {
    undo(j);
    return code;
  }
  mi.phase = MI_ATTACHED;
  *own = j->own;
  return MPIML_OK;
}

int mpiml_attach(MPI_Comm comm, const char *label, MPI_Comm *own) {
  mi_at("mpiml_attach", label, NULL);
  int code = ready(comm);
  if (code != MPIML_OK) return code;
  joining j = {.given = comm, .link = MPI_COMM_NULL, .own = MPI_COMM_NULL, .label = label};
  MPI_Errhandler handler;
  code = mi_mpi("MPI_Comm_get_errhandler", MPI_Comm_get_errhandler(comm, &handler));
  if (code != MPIML_OK) return code;
  code = mi_mpi("MPI_Comm_set_errhandler", MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN));
  if (code == MPIML_OK) {
    code = attach(&j, handler, own);
    MPI_Comm_set_errhandler(comm, handler); /* if it fails, so does what the code does next */
  }
  MPI_Errhandler_free(&handler);
  return code;
}
