/* manifest.h: what a guest learns about the program when it attaches. No MPI. */
#ifndef MPIML_MANIFEST_H
#define MPIML_MANIFEST_H

#include "array.h"

/* A message that waits for room; see outbox.c. */
struct mi_waiting;

/* From this guest to one subscription of a Python node. */
typedef struct mi_way {
  uint32_t vertex, aux;
  int rank;
  uint64_t number;           /* messages that were put, those dropped too */
  uint32_t open;             /* sent, and not acknowledged */
  uint32_t waiting;          /* length of the list */
  struct mi_waiting *oldest, *newest;
  bool gone;                 /* the subscriber has left */
} mi_way;

/* A publisher that this guest hears, by one of its subscriptions. */
typedef struct mi_heard {
  uint32_t vertex, aux;
  int rank;
  uint64_t number; /* of its last message */
  uint64_t came;   /* messages that have come; some never leave their publisher */
} mi_heard;

struct mi_parcel;

enum { MI_LATEST = 0, MI_KEEP = 1, MI_DROP_OLDEST = 2 };

typedef struct mi_topic {
  char *name;
  uint32_t number, window;
  int policy;
  bool round_robin, publishes, hears;
  mi_spec expected; /* dtype 0: any; ndim -1: any; shape -1: any */
  int nways, nheard;
  mi_way *ways;
  mi_heard *heard;
  int turn;                  /* whose turn it is of a round */
  struct mi_parcel *kept;    /* messages that have come, oldest first */
  uint64_t version;          /* of what was taken last */
} mi_topic;

typedef struct mi_method {
  char *name;
  bool stream;
} mi_method;

typedef struct mi_replica {
  uint32_t vertex;
  int rank;
} mi_replica;

typedef struct mi_service {
  char *label;
  bool allowed; /* to this guest */
  int nreplicas, nmethods;
  mi_replica *replicas;
  mi_method *methods;
} mi_service;

typedef struct mi_server {
  char *label;
  bool allowed;
} mi_server;

typedef struct mi_bell {
  char *host, *path;
  int nlines;
  int *ranks;
  uint32_t *lines;
} mi_bell;

typedef struct mi_manifest {
  uint32_t vertex; /* of this guest */
  int guests, npython;
  int *python; /* their ranks, ascending */
  char *title;
  int ntopics, nservices, nservers, nbells;
  mi_topic *topics;
  mi_service *services;
  mi_server *servers;
  mi_bell *bells;
} mi_manifest;

/* Takes a manifest apart for the guest number `index` of `label`. MPIML_OK, or
 * MPIML_ERR_VERSION if the bytes are none of this version, MPIML_ERR_ATTACH if the program has
 * no such guest, MPIML_ERR_MEMORY. */
int mi_manifest_read(mi_manifest *manifest, const unsigned char *bytes, size_t size,
                     const char *label, int index);

/* Frees all that it holds. */
void mi_manifest_clear(mi_manifest *manifest);

#endif
