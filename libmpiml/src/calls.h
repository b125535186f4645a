/* calls.h: requests of this guest, one at a time, and what comes back. */
#ifndef MPIML_CALLS_H
#define MPIML_CALLS_H

#include "link.h"

/* Sends a request with `count` entries and waits for its reply until `deadline`. The entries'
 * memory may be read until this returns. *reply must be given back by mi_reply_done. */
int mi_ask(int rank, uint32_t target, const char *method, int form, int count, mi_entry *entries,
           double deadline, mi_parcel **reply);

/* Lets go of a reply, whose buffers may not have been asked for. */
void mi_reply_done(mi_parcel *reply);

/* A reply or an error has come. */
int mi_on_reply(int rank, const mi_frame *frame, mi_parcel *parcel);

/* Checks an array and describes it as an entry of a request. */
int mi_argument(const mpiml_array *x, mi_entry *entry);

#endif
