/* link.h: frames and their buffers over MPI, and progress. */
#ifndef MPIML_LINK_H
#define MPIML_LINK_H

#include "memory.h"
#include "wire.h"

/* A frame that has come and is not done with: its bytes, and its buffers as they come in. */
typedef struct mi_parcel {
  struct mi_parcel *next;  /* of those whose buffers are not asked for yet, in order */
  struct mi_parcel *later; /* of its topic */
  int rank;
  mi_frame frame;          /* into `bytes` */
  mi_block *bytes;
  void *memory[MI_ENTRIES];     /* where each buffer goes */
  mi_block *blocks[MI_ENTRIES]; /* of our own memory; NULL for a caller's */
  int open;                     /* messages under way */
  bool posted;                  /* its buffers are asked for */
  void (*finish)(struct mi_parcel *); /* called instead of who waits, when all is there */
} mi_parcel;

/* Starts to receive on `comm`, which the link owns from now on. */
int mi_link_open(MPI_Comm comm);

/* Frees the communicator. What is under way, if anything, is left as it is. */
int mi_link_close(void);

/* Sends a frame and its buffers. Of each buffer `blocks` has the block that it is in, which is
 * held until it has left; NULL for memory of the caller, which then counts as borrowed. */
int mi_send(int rank, const mi_frame *frame, const size_t *lengths, const void *const *data,
            mi_block *const *blocks);

/* How many sends read memory of the caller; how many sends and receives there are in all. */
int mi_borrowed(void);
int mi_moving(void);

/* One turn: takes frames in, moves transfers on. MPIML_OK or MPIML_ERR_MPI. */
int mi_poll(void);

/* Makes turns until ready(argument). Ends with a stop if `ends` says so: MPIML_STOPPED or
 * MPIML_ERR_FAILED; with a failure alone for MI_BY_FAILURE. After `deadline` (mi_now)
 * MPIML_ERR_TIMEOUT, without a text. */
enum { MI_BY_NOTHING, MI_BY_FAILURE, MI_BY_STOP };
int mi_wait(bool (*ready)(void *), void *argument, double deadline, int ends);

/* Seconds of a clock that only goes on. */
double mi_now(void);

/* Makes a parcel of a frame that has no buffers; NULL without memory. */
mi_parcel *mi_parcel_of(int rank, const mi_frame *frame);

/* Asks for the buffers of a parcel, and before it for those that come earlier from its rank.
 * memory[i] is where buffer i goes, or NULL for our own. */
int mi_parcel_post(mi_parcel *parcel, void *const *memory);

/* Whether all its buffers are there. */
bool mi_parcel_there(void *parcel);

/* Calls `finish`, which must free it, once all its buffers are there; at once if they are. */
int mi_parcel_leave(mi_parcel *parcel, void (*finish)(mi_parcel *));

void mi_parcel_free(mi_parcel *parcel);

/* Hands out what comes; see deliver.c. `parcel`, if there are buffers, belongs to it now. */
int mi_deliver(int rank, const mi_frame *frame, mi_parcel *parcel);

/* bells.c: maps what wakes ranks of this host; without, they look by themselves. */
void mi_bells_open(void);
void mi_bells_close(void);
void mi_ring(int rank);

#endif
