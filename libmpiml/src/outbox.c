/* outbox.c: what is on its way to one subscriber: how much may be, and what is dropped.
 *
 * The rules of mpiml/topics/queues.py: `window` messages may be sent and not acknowledged. One
 * more waits, or replaces the oldest of those that wait; with Keep(n) its publisher waits before
 * it puts it.
 */
#include "errors.h"
#include "topics.h"
#include "state.h"

#include <stdlib.h>

struct mi_waiting {
  struct mi_waiting *next;
  uint64_t number;
  mi_message message;
};

bool mi_way_room(const mi_topic *topic, const mi_way *way) {
  return topic->policy != MI_KEEP || way->open < topic->window;
}

bool mi_way_ready(const mi_topic *topic, const mi_way *way) {
  return way->waiting == 0 && way->open < topic->window;
}

static int transmit(mi_way *way, uint64_t number, const mi_message *message) {
  mi_frame frame = {
      .kind = MI_TOPIC,
      .encoding = MI_ARRAYS,
      .source = mi.program.vertex,
      .target = way->vertex,
      .aux = way->aux,
      .id = number,
      .body = message->body->data,
      .body_size = message->body_size,
      .buffers = message->data != NULL,
  };
  const void *data = message->data ? message->data->data : NULL;
  ++way->open;
  return mi_send(way->rank, &frame, &message->bytes, &data, &message->data);
}

static void forget_oldest(mi_way *way) {
  struct mi_waiting *oldest = way->oldest;
  way->oldest = oldest->next;
  if (!way->oldest) way->newest = NULL;
  --way->waiting;
  mi_drop(oldest->message.body);
  mi_drop(oldest->message.data);
  free(oldest);
}

void mi_way_clear(mi_way *way) {
  while (way->oldest) forget_oldest(way);
}

int mi_way_put(const mi_topic *topic, mi_way *way, const mi_message *message) {
  ++way->number;
  if (mi_way_ready(topic, way)) return transmit(way, way->number, message);
  struct mi_waiting *waiting = malloc(sizeof *waiting);
  if (!waiting) return mi_fail(MPIML_ERR_MEMORY, "no memory for a message");
  *waiting = (struct mi_waiting){NULL, way->number, *message};
  mi_hold(message->body);
  if (message->data) mi_hold(message->data);
  if (way->newest) way->newest->next = waiting;
  else way->oldest = waiting;
  way->newest = waiting;
  ++way->waiting;
  int code = mi_way_release(topic, way);
  while (way->waiting > topic->window) forget_oldest(way);
  return code;
}

int mi_way_release(const mi_topic *topic, mi_way *way) {
  int code = MPIML_OK;
  while (way->waiting && way->open < topic->window && code == MPIML_OK) {
    code = transmit(way, way->oldest->number, &way->oldest->message);
    forget_oldest(way);
  }
  return code;
}
