/* newest.c: arrays that come on topics, and the newest of them into the caller's memory.
 *
 * Elements that travel apart stay where they are until they are asked for, and are then received
 * straight into the caller's memory; their publisher is told then. With Keep(n) it is told when
 * the message is taken, else when a message has come.
 */
#include "errors.h"
#include "names.h"
#include "receive.h"
#include "state.h"
#include "topics.h"

#include <math.h>
#include <stdio.h>

static mi_heard *heard_of(mi_topic *topic, const mi_frame *frame) {
  for (int i = 0; i < topic->nheard; ++i)
    if (topic->heard[i].vertex == frame->source && topic->heard[i].aux == frame->aux)
      return &topic->heard[i];
  return NULL;
}

static mi_topic *topic_of(const mi_frame *frame) {
  for (int i = 0; i < mi.program.ntopics; ++i)
    if (mi.program.topics[i].number == frame->aux >> 16) return &mi.program.topics[i];
  return NULL;
}

static int acknowledge(const mi_parcel *parcel) {
  mi_frame frame = {
      .kind = MI_TOPIC_ACK,
      .source = mi.program.vertex,
      .target = parcel->frame.source,
      .aux = parcel->frame.aux,
      .id = 1,
  };
  return mi_send(parcel->rank, &frame, NULL, NULL, NULL);
}

/* Of a message that nobody takes: its publisher may go on. */
static void finish_dropped(mi_parcel *parcel) {
  if (mi.phase == MI_ATTACHED) acknowledge(parcel);
  mi_parcel_free(parcel);
}

/* Whether the publisher is told on arrival: it was, if there are no buffers. */
static bool told(const mi_topic *topic, const mi_parcel *parcel) {
  return topic->policy != MI_KEEP && parcel->frame.buffers == 0;
}

static int drop_oldest(mi_topic *topic) {
  mi_parcel *oldest = topic->kept;
  topic->kept = oldest->later;
  if (!told(topic, oldest)) return mi_parcel_leave(oldest, finish_dropped);
  mi_parcel_free(oldest);
  return MPIML_OK;
}

int mi_on_message(int rank, const mi_frame *frame, mi_parcel *parcel) {
  mi_topic *topic = topic_of(frame);
  mi_heard *heard = topic ? heard_of(topic, frame) : NULL;
  if (!heard || mi.phase != MI_ATTACHED)
    return parcel ? mi_parcel_leave(parcel, mi_parcel_free) : MPIML_OK;
  if (!parcel) parcel = mi_parcel_of(rank, frame);
  if (!parcel) return MPIML_ERR_MEMORY;
  heard->number = parcel->frame.id;
  ++heard->came;
  parcel->later = NULL;
  mi_parcel **end = &topic->kept;
  while (*end) end = &(*end)->later;
  *end = parcel;
  int code = told(topic, parcel) ? acknowledge(parcel) : MPIML_OK;
  while (code == MPIML_OK && topic->policy != MI_KEEP && topic->kept->later)
    code = drop_oldest(topic);
  return code;
}

int mi_heard_leave(const mi_topic *topic, const mi_heard *heard) {
  uint64_t settled = heard->came;
  for (const mi_parcel *kept = topic->kept; kept; kept = kept->later)
    settled -= kept->frame.source == heard->vertex && kept->frame.aux == heard->aux;
  char number[24];
  int length = snprintf(number, sizeof number, "%llu", (unsigned long long)settled);
  mi_frame frame = {
      .kind = MI_TOPIC_ACK,
      .source = mi.program.vertex,
      .target = heard->vertex,
      .aux = heard->aux,
      .body = (const unsigned char *)number,
      .body_size = (size_t)length,
  };
  return mi_send(heard->rank, &frame, NULL, NULL, NULL);
}

/* Brings the one message that is kept into the caller's memory. */
static int take(mi_topic *topic, mpiml_array *into) {
  mi_parcel *parcel = topic->kept;
  mi_entry entries[MI_ENTRIES];
  int form;
  if (mi_body_read(&parcel->frame, &form, entries) != 1 || form != MI_ONE) {
    drop_oldest(topic);
    return mi_fail(MPIML_ERR_DTYPE, "expected one array, got a message that is none");
  }
  int code = mi_match(into, &entries[0].spec);
  if (code != MPIML_OK) return code;
  /* While it is received more may come, which would drop one that is kept. */
  topic->kept = NULL;
  uint64_t version = 0;
  for (int i = 0; i < topic->nheard; ++i) version += topic->heard[i].number;
  code = mi_receive(parcel, 1, entries, &into, INFINITY);
  if (code != MPIML_OK) {
    mi_parcel_leave(parcel, finish_dropped);
    return code;
  }
  topic->version = version;
  code = told(topic, parcel) ? MPIML_OK : acknowledge(parcel);
  mi_parcel_free(parcel);
  return code;
}

int mpiml_newest(const char *name, mpiml_array *into, int64_t *version) {
  mi_at("mpiml_newest", name, NULL);
  int code = mi_enter(false);
  if (code != MPIML_OK) return code;
  mi_topic *topic = mi_topic_named(name);
  if (!topic) return MPIML_ERR_TOPIC;
  if (!topic->hears)
    return mi_fail(MPIML_ERR_TOPIC, "expected this node to be a subscriber of the topic. Let its "
                                    "node be ExternalNode(subscribes=topic) in the Python program.");
  if (!version) return mi_fail(MPIML_ERR_USAGE, "expected memory for the version, got NULL");
  code = mi_check(into, NULL);
  if (code != MPIML_OK) return code;
  while (topic->kept && topic->kept->later && code == MPIML_OK) code = drop_oldest(topic);
  if (code == MPIML_OK && topic->kept) code = take(topic, into);
  if (code == MPIML_OK) *version = (int64_t)topic->version;
  return code;
}
