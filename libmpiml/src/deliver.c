/* deliver.c: hands out the frames that come. Runs inside mi_poll: sends, but never waits. */
#include "calls.h"
#include "leave.h"
#include "state.h"
#include "topics.h"

int mi_deliver(int rank, const mi_frame *frame, mi_parcel *parcel) {
  switch (frame->kind) {
    case MI_TOPIC:
      return mi_on_message(rank, frame, parcel);
    case MI_REPLY:
    case MI_ERROR:
      return mi_on_reply(rank, frame, parcel);
    case MI_TOPIC_ACK:
      return mi_on_ack(frame);
    case MI_STOP:
      mi_on_stop(frame->body, frame->body_size);
      return MPIML_OK;
    case MI_GUEST_GONE:
      mi_on_gone(rank);
      return MPIML_OK;
    default: /* TOPIC_END: nobody waits for what comes on a topic */
      return parcel ? mi_parcel_leave(parcel, mi_parcel_free) : MPIML_OK;
  }
}
