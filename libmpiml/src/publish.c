/* publish.c: arrays from this guest to those who hear it. */
#include "errors.h"
#include "names.h"
#include "state.h"
#include "topics.h"

#include <math.h>

/* MPIML_OK if the topic takes arrays like x. */
static int expected(const mi_topic *topic, const mpiml_array *x) {
  const mi_spec *spec = &topic->expected;
  if (spec->dtype && spec->dtype != x->dtype)
    return mi_fail(MPIML_ERR_DTYPE,
                   "expected %s, as the topic is declared, got %s. dtypes are never converted.",
                   mi_dtype_name(spec->dtype), mi_dtype_name(x->dtype));
  bool same = spec->ndim < 0 || spec->ndim == x->ndim;
  for (int i = 0; same && i < spec->ndim; ++i)
    same = spec->shape[i] < 0 || spec->shape[i] == x->shape[i];
  if (same) return MPIML_OK;
  char wanted[192], got[192];
  return mi_fail(MPIML_ERR_SHAPE, "expected shape %s, as the topic is declared (-1: any), got %s",
                 mi_shape_text(spec->ndim, spec->shape, wanted, sizeof wanted),
                 mi_shape_text(x->ndim, x->shape, got, sizeof got));
}

/* For one of a round: the way that is next, not one whose subscriber has left if there is
 * another; `at_once`: only one on which a message goes at once. -1 if there is none. */
static int next_way(const mi_topic *topic, bool at_once) {
  for (int i = 0; i < topic->nways; ++i) {
    int k = (topic->turn + i) % topic->nways;
    const mi_way *way = &topic->ways[k];
    if (way->gone) continue;
    if (at_once ? mi_way_ready(topic, way) : mi_way_room(topic, way)) return k;
  }
  return -1;
}

static bool all_gone(const mi_topic *topic) {
  for (int i = 0; i < topic->nways; ++i)
    if (!topic->ways[i].gone) return false;
  return true;
}

static bool room(void *argument) {
  const mi_topic *topic = argument;
  if (topic->round_robin) return all_gone(topic) || next_way(topic, false) >= 0;
  for (int i = 0; i < topic->nways; ++i)
    if (!topic->ways[i].gone && !mi_way_room(topic, &topic->ways[i])) return false;
  return true;
}

static int pack(const mpiml_array *x, size_t bytes, mi_message *message) {
  enum { HEAD = 8 + 8 + 8 * MPIML_MAX_DIMS };
  mi_entry entry = {.spec = mi_spec_of(x), .bytes = bytes, .array = x};
  size_t limit = HEAD + 8 + (bytes <= MI_INLINE ? bytes : 0);
  message->body = mi_take(limit);
  if (!message->body) return mi_fail(MPIML_ERR_MEMORY, "no memory for a message");
  message->body_size = mi_body_write(message->body->data, limit, MI_ONE, 1, &entry);
  message->bytes = bytes;
  if (!entry.apart) return MPIML_OK;
  message->data = mi_take(bytes);
  if (!message->data) return mi_fail(MPIML_ERR_MEMORY, "no memory for %zu bytes", bytes);
  mi_pack(x, message->data->data);
  return MPIML_OK;
}

static int put(mi_topic *topic, const mi_message *message) {
  int code = MPIML_OK;
  if (topic->round_robin) {
    int k = next_way(topic, true);
    if (k < 0) k = next_way(topic, false);
    topic->turn = (topic->turn + 1) % topic->nways;
    return k < 0 ? MPIML_OK : mi_way_put(topic, &topic->ways[k], message);
  }
  for (int i = 0; i < topic->nways && code == MPIML_OK; ++i)
    if (!topic->ways[i].gone) code = mi_way_put(topic, &topic->ways[i], message);
  return code;
}

int mpiml_publish(const char *name, const mpiml_array *x) {
  mi_at("mpiml_publish", name, NULL);
  int code = mi_enter(false);
  if (code != MPIML_OK) return code;
  mi_topic *topic = mi_topic_named(name);
  if (!topic) return MPIML_ERR_TOPIC;
  if (!topic->publishes)
    return mi_fail(MPIML_ERR_TOPIC, "expected this node to be a publisher of the topic. Let its "
                                    "node be ExternalNode(publishes=topic) in the Python program.");
  size_t bytes;
  code = mi_check(x, &bytes);
  if (code == MPIML_OK) code = expected(topic, x);
  if (code != MPIML_OK || topic->nways == 0) return code;
  if (!room(topic)) code = mi_wait(room, topic, INFINITY, MI_BY_STOP);
  if (code != MPIML_OK) return code;
  mi_message message = {0};
  code = pack(x, bytes, &message);
  if (code == MPIML_OK) code = put(topic, &message);
  mi_drop(message.body);
  mi_drop(message.data);
  return code;
}

int mi_on_ack(const mi_frame *frame) {
  for (int i = 0; i < mi.program.ntopics; ++i) {
    mi_topic *topic = &mi.program.topics[i];
    if (topic->number != frame->aux >> 16) continue;
    for (int k = 0; k < topic->nways; ++k) {
      mi_way *way = &topic->ways[k];
      if (way->vertex != frame->source || way->aux != frame->aux) continue;
      if (frame->id == 0) {
        way->gone = true;
        mi_way_clear(way);
        return MPIML_OK;
      }
      way->open -= frame->id < way->open ? (uint32_t)frame->id : way->open;
      return mi_way_release(topic, way);
    }
  }
  return MPIML_OK;
}

bool mi_topics_sent(void *unused) {
  (void)unused;
  for (int i = 0; i < mi.program.ntopics; ++i)
    for (int k = 0; k < mi.program.topics[i].nways; ++k)
      if (mi.program.topics[i].ways[k].waiting) return false;
  return true;
}

int mi_topics_leave(bool cut) {
  int code = MPIML_OK;
  mi_frame frame = {.source = mi.program.vertex};
  for (int i = 0; i < mi.program.ntopics; ++i) {
    mi_topic *topic = &mi.program.topics[i];
    for (int k = 0; k < topic->nways && code == MPIML_OK; ++k) {
      mi_way *way = &topic->ways[k];
      if (cut) mi_way_clear(way);
      frame.kind = MI_TOPIC_END;
      frame.encoding = cut;
      frame.target = way->vertex;
      frame.aux = way->aux;
      frame.id = way->number;
      code = mi_send(way->rank, &frame, NULL, NULL, NULL);
    }
    for (int k = 0; k < topic->nheard && code == MPIML_OK; ++k)
      code = mi_heard_leave(topic, &topic->heard[k]);
    while (topic->kept && code == MPIML_OK) {
      mi_parcel *kept = topic->kept;
      topic->kept = kept->later;
      code = mi_parcel_leave(kept, mi_parcel_free);
    }
  }
  return code;
}
