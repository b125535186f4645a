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
    default:
      break;
  }
  int code = MPIML_OK; /* these have no buffers; if one has, it still means what it says */
  if (frame->kind == MI_TOPIC_ACK) code = mi_on_ack(frame);
  if (frame->kind == MI_STOP) mi_on_stop(frame->body, frame->body_size);
  if (frame->kind == MI_GUEST_GONE) mi_on_gone(rank);
  /* TOPIC_END: nobody waits for what comes on a topic */
  int left = parcel ? mi_parcel_leave(parcel, mi_parcel_free) : MPIML_OK;
  return code != MPIML_OK ? code : left;
}
