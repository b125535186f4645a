/* state.h: what the library knows in this process. One program, attached once. */
#ifndef MPIML_STATE_H
#define MPIML_STATE_H

#include "manifest.h"

typedef enum { MI_BEFORE, MI_ATTACHED, MI_LEAVING, MI_LEFT } mi_phase;

typedef struct mi_state {
  mi_phase phase;
  int rank, size;      /* in the communicator that was given */
  int index;           /* of this guest in its label */
  int keeper;          /* rank of the Python rank that stops go by way of */
  mi_manifest program;
  int stop;            /* MPIML_OK, MPIML_STOPPED or MPIML_ERR_FAILED */
  char *reason;        /* of the stop */
  int broken;          /* code of the MPI error after which nothing is sent any more */
  int *partners;       /* Python ranks that are told when this one leaves */
  int npartners;
} mi_state;

extern mi_state mi;

/* Begins a function of the header: one turn of progress, and MPIML_OK if it may go on. With
 * `after_stop` it may after a stop, too. */
int mi_enter(bool after_stop);

/* Returns the code of a stop, with its text; MPIML_OK if there is none. */
int mi_stopped(void);

/* Takes in that the program stops: a note of docs/design/0008-external.md. */
void mi_on_stop(const unsigned char *note, size_t size);

/* Notes a rank that is to be told when this one leaves. MPIML_OK or MPIML_ERR_MEMORY. */
int mi_partner(int rank);

#endif
