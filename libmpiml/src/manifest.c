/* manifest.c: takes apart what a guest learns about the program when it attaches. */
#include "manifest.h"

#include "errors.h"
#include "wire.h"

#include <stdlib.h>
#include <string.h>

/* Where the next field is. Once something is wrong, all that is read is 0. */
typedef struct {
  const unsigned char *at;
  size_t left;
  bool bad, no_memory;
} reader;

static uint64_t number(reader *r, int bytes) {
  if (r->bad || r->left < (size_t)bytes) {
    r->bad = true;
    return 0;
  }
  uint64_t value = mi_get(r->at, bytes);
  r->at += bytes;
  r->left -= (size_t)bytes;
  return value;
}

static uint32_t u32(reader *r) { return (uint32_t)number(r, 4); }

/* A count of things of `least` bytes each, so that no count leads to a huge allocation. */
static int count(reader *r, size_t least) {
  uint32_t n = u32(r);
  if (n > r->left / least) r->bad = true;
  return r->bad ? 0 : (int)n;
}

static void *zeroed(reader *r, int n, size_t size) {
  void *memory = calloc(n > 0 ? (size_t)n : 1, size);
  if (!memory) r->bad = r->no_memory = true;
  return memory;
}

static char *text(reader *r) {
  size_t length = (size_t)number(r, 2);
  if (r->bad || r->left < length) {
    r->bad = true;
    length = 0;
  }
  char *copy = zeroed(r, (int)length + 1, 1);
  if (copy) memcpy(copy, r->at, length);
  r->at += length;
  r->left -= length;
  return copy;
}

/* Reads ranges; whether `x` is in one. */
static bool among(reader *r, uint32_t x) {
  bool found = false;
  for (int n = count(r, 8); n > 0; --n) {
    uint32_t first = u32(r), last = u32(r);
    found = found || (first <= x && x <= last);
  }
  return found;
}

static void read_python(reader *r, mi_manifest *m, uint32_t expected) {
  if (expected > 1u << 28) r->bad = true;
  m->python = zeroed(r, r->bad ? 0 : (int)expected, sizeof *m->python);
  for (int n = count(r, 8); n > 0 && !r->bad; --n) {
    uint32_t first = u32(r), last = u32(r);
    for (uint64_t rank = first; rank <= last && !r->bad; ++rank) {
      if (m->npython >= (int)expected) r->bad = true;
      else m->python[m->npython++] = (int)rank;
    }
  }
}

/* Finds the guest's own label; false if it is not there. */
static bool read_labels(reader *r, mi_manifest *m, const char *label, int index) {
  bool found = false;
  for (int n = count(r, 12); n > 0 && !r->bad; --n) {
    char *name = text(r);
    uint32_t first = u32(r), size = u32(r);
    char *title = text(r);
    if (!r->bad && strcmp(name, label) == 0 && (uint32_t)index < size) {
      found = true;
      m->vertex = first + (uint32_t)index;
      free(m->title);
      m->title = title;
      title = NULL;
    }
    free(name);
    free(title);
  }
  return found;
}

static void read_expected(reader *r, mi_topic *t) {
  t->expected.dtype = (int)number(r, 1);
  int ndim = (int)number(r, 1);
  t->expected.ndim = ndim == 255 ? -1 : ndim;
  if (ndim != 255 && ndim > MPIML_MAX_DIMS) {
    r->bad = true;
    return;
  }
  for (int i = 0; i < t->expected.ndim; ++i) t->expected.shape[i] = (int64_t)number(r, 8);
}

static void read_ways(reader *r, mi_topic *t, uint32_t vertex) {
  int n = count(r, 16);
  t->ways = zeroed(r, n, sizeof *t->ways);
  for (; n > 0 && !r->bad; --n) {
    mi_way way = {.vertex = u32(r), .rank = 0};
    way.rank = (int)u32(r);
    way.aux = u32(r);
    if (among(r, vertex) && !r->bad) t->ways[t->nways++] = way;
  }
}

/* The guest's own subscriptions, and the publishers each of them hears. What is heard stands
 * before the publishers, so it is read twice. */
static void read_heard(reader *r, mi_topic *t, uint32_t vertex) {
  reader start = *r;
  int subscriptions = count(r, 16), own = 0;
  for (int n = subscriptions; n > 0 && !r->bad; --n) {
    uint32_t first = u32(r), last = u32(r);
    u32(r);
    among(r, 0);
    own += first <= vertex && vertex <= last;
  }
  int publishers = count(r, 8);
  t->hears = own > 0;
  if (r->bad || !own) {
    for (; publishers > 0; --publishers) number(r, 8);
    return;
  }
  t->heard = zeroed(r, own * publishers, sizeof *t->heard);
  for (; publishers > 0 && !r->bad; --publishers) {
    uint32_t publisher = u32(r), rank = u32(r);
    reader again = start;
    for (int n = count(&again, 16); n > 0; --n) {
      uint32_t first = u32(&again), last = u32(&again), aux = u32(&again);
      bool hears = among(&again, publisher);
      if (hears && first <= vertex && vertex <= last)
        t->heard[t->nheard++] = (mi_heard){publisher, aux, (int)rank, 0, 0};
    }
  }
}

static void read_topic(reader *r, mi_topic *t, uint32_t vertex) {
  t->name = text(r);
  t->number = u32(r);
  t->policy = (int)number(r, 1);
  t->round_robin = number(r, 1) != 0;
  number(r, 2);
  t->window = u32(r);
  read_expected(r, t);
  t->publishes = among(r, vertex);
  read_ways(r, t, vertex);
  read_heard(r, t, vertex);
}

static void read_service(reader *r, mi_service *s, uint32_t vertex) {
  s->label = text(r);
  s->allowed = among(r, vertex);
  int n = count(r, 8);
  s->replicas = zeroed(r, n, sizeof *s->replicas);
  for (; n > 0 && !r->bad; --n) {
    mi_replica *replica = &s->replicas[s->nreplicas++];
    replica->vertex = u32(r);
    replica->rank = (int)u32(r);
  }
  n = count(r, 3);
  s->methods = zeroed(r, n, sizeof *s->methods);
  for (; n > 0 && !r->bad; --n) {
    mi_method *method = &s->methods[s->nmethods++];
    method->name = text(r);
    method->stream = number(r, 1) != 0;
  }
}

static void read_bell(reader *r, mi_bell *b) {
  b->host = text(r);
  b->path = text(r);
  int n = count(r, 8);
  b->ranks = zeroed(r, n, sizeof *b->ranks);
  b->lines = zeroed(r, n, sizeof *b->lines);
  for (; n > 0 && !r->bad; --n) {
    b->ranks[b->nlines] = (int)u32(r);
    b->lines[b->nlines++] = u32(r);
  }
}

int mi_manifest_read(mi_manifest *m, const unsigned char *bytes, size_t size, const char *label,
                     int index) {
  *m = (mi_manifest){0};
  reader reading = {.at = bytes, .left = size}, *r = &reading;
  uint64_t version = number(r, 1);
  number(r, 3);
  m->guests = (int)u32(r);
  uint32_t python = u32(r), slot = u32(r);
  if (version != 1 || slot != MI_SLOT) r->bad = true;
  read_python(r, m, python);
  bool found = read_labels(r, m, label, index);
  m->topics = zeroed(r, m->ntopics = count(r, 36), sizeof *m->topics);
  for (int i = 0; i < m->ntopics && !r->bad; ++i) read_topic(r, &m->topics[i], m->vertex);
  m->services = zeroed(r, m->nservices = count(r, 14), sizeof *m->services);
  for (int i = 0; i < m->nservices && !r->bad; ++i) read_service(r, &m->services[i], m->vertex);
  m->servers = zeroed(r, m->nservers = count(r, 6), sizeof *m->servers);
  for (int i = 0; i < m->nservers && !r->bad; ++i) {
    m->servers[i].label = text(r);
    m->servers[i].allowed = among(r, m->vertex);
  }
  m->bells = zeroed(r, m->nbells = count(r, 8), sizeof *m->bells);
  for (int i = 0; i < m->nbells && !r->bad; ++i) read_bell(r, &m->bells[i]);
  int code = MPIML_OK;
  if (r->no_memory)
    code = mi_fail(MPIML_ERR_MEMORY, "no memory for the program's tables");
  else if (r->bad || r->left || !m->python || m->npython != (int)python)
    code = mi_fail(MPIML_ERR_VERSION,
                   "expected tables of version 1, got %zu bytes that are none. Build "
                   "the library from the mpiml that Python imports.",
                   size);
  else if (!found)
    code = mi_fail(MPIML_ERR_ATTACH, "the program has no external node \"%s\" number %d",
                   label, index);
  if (code != MPIML_OK) mi_manifest_clear(m);
  return code;
}

void mi_manifest_clear(mi_manifest *m) {
  for (int i = 0; m->topics && i < m->ntopics; ++i) {
    free(m->topics[i].name);
    free(m->topics[i].ways);
    free(m->topics[i].heard);
  }
  for (int i = 0; m->services && i < m->nservices; ++i) {
    mi_service *s = &m->services[i];
    for (int k = 0; k < s->nmethods; ++k) free(s->methods[k].name);
    free(s->methods);
    free(s->replicas);
    free(s->label);
  }
  for (int i = 0; m->servers && i < m->nservers; ++i) free(m->servers[i].label);
  for (int i = 0; m->bells && i < m->nbells; ++i) {
    free(m->bells[i].host);
    free(m->bells[i].path);
    free(m->bells[i].ranks);
    free(m->bells[i].lines);
  }
  free(m->topics);
  free(m->services);
  free(m->servers);
  free(m->bells);
  free(m->python);
  free(m->title);
  *m = (mi_manifest){0};
}
