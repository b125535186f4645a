/* topics.h: what this guest publishes and hears. */
#ifndef MPIML_TOPICS_H
#define MPIML_TOPICS_H

#include "link.h"
#include "manifest.h"

/* A message that was published: its body, and its elements if they travel apart. */
typedef struct mi_message {
  mi_block *body, *data;
  size_t body_size, bytes;
} mi_message;

/* What comes: a message with its buffers in `parcel` or NULL, an acknowledgement. */
int mi_on_message(int rank, const mi_frame *frame, mi_parcel *parcel);
int mi_on_ack(const mi_frame *frame);

/* outbox.c: whether a message may be put on a way now, and whether it would go at once. */
bool mi_way_room(const mi_topic *topic, const mi_way *way);
bool mi_way_ready(const mi_topic *topic, const mi_way *way);

/* Puts a message on a way: it is sent, or waits, perhaps in another's place. */
int mi_way_put(const mi_topic *topic, mi_way *way, const mi_message *message);

/* Sends what waits, as far as there is room. */
int mi_way_release(const mi_topic *topic, mi_way *way);

/* Drops what waits. */
void mi_way_clear(mi_way *way);

/* Says to a publisher that nothing more is heard. */
int mi_heard_leave(const mi_topic *topic, const mi_heard *heard);

/* Ends everything: says on each way that nothing more comes, and to publishers that nothing
 * more is heard. `cut`: the end is not that of the work, and what waits is dropped. */
int mi_topics_leave(bool cut);

/* Whether nothing waits on any way. */
bool mi_topics_sent(void *unused);

#endif
