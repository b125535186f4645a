/* names.c: finds what a name means in the program, or says which names there are. */
#include "names.h"

#include "errors.h"
#include "state.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LIST = 1024 };

/* Appends "name" to a list of names, as far as there is room. */
static void list(char *text, const char *name) {
  size_t used = strlen(text);
  snprintf(text + used, LIST - used, "%s\"%s\"", used ? ", " : "", name);
}

mi_topic *mi_topic_named(const char *name) {
  static int last; /* most codes use one topic, again and again */
  mi_manifest *m = &mi.program;
  if (!name) {
    mi_fail(MPIML_ERR_TOPIC, "expected the name of a topic, got NULL");
    return NULL;
  }
  if (last < m->ntopics && strcmp(m->topics[last].name, name) == 0) return &m->topics[last];
  char names[LIST] = "";
  for (int i = 0; i < m->ntopics; ++i) {
    if (strcmp(m->topics[i].name, name) == 0) return &m->topics[last = i];
    list(names, m->topics[i].name);
  }
  mi_fail(MPIML_ERR_TOPIC, "expected a topic of the program %s: %s", m->title,
          *names ? names : "its ExternalNodes take part in none");
  return NULL;
}

/* The service of a label; rather one that was given to this node than another's. */
static const mi_service *service_of(const char *name, size_t length) {
  const mi_service *found = NULL;
  for (int i = 0; i < mi.program.nservices; ++i) {
    const mi_service *service = &mi.program.services[i];
    if (strlen(service->label) != length || memcmp(service->label, name, length) != 0) continue;
    if (service->allowed) return service;
    found = service;
  }
  return found;
}

static bool serves_parameters(const char *label) {
  for (int i = 0; i < mi.program.nservers; ++i)
    if (mi.program.servers[i].allowed && strcmp(mi.program.servers[i].label, label) == 0)
      return true;
  return false;
}

static int no_service(const char *name) {
  if (serves_parameters(name))
    return mi_fail(MPIML_ERR_SERVICE, "expected a service; this one is a parameter server. Use "
                                      "mpiml_pull and mpiml_push.");
  char names[LIST] = "";
  for (int i = 0; i < mi.program.nservices; ++i)
    if (mi.program.services[i].allowed) list(names, mi.program.services[i].label);
  return mi_fail(MPIML_ERR_SERVICE,
                 "expected a service that was given to this ExternalNode: %s. Give it the handle in "
                 "the Python program: ExternalNode(calls=...).",
                 *names ? names : "it was given none");
}

const mi_replica *mi_replica_named(const char *name, const mi_service **service) {
  if (!name) {
    mi_fail(MPIML_ERR_SERVICE, "expected the label of a service, got NULL");
    return NULL;
  }
  long number = -1;
  *service = service_of(name, strlen(name));
  const char *slash = strrchr(name, '/');
  if (!*service && slash) {
    char *end;
    number = strtol(slash + 1, &end, 10);
    if (end != slash + 1 && *end == '\0' && number >= 0)
      *service = service_of(name, (size_t)(slash - name));
  }
  if (!*service || !(*service)->allowed || (*service)->nreplicas == 0) {
    no_service(name);
    return NULL;
  }
  if (number >= (*service)->nreplicas) {
    mi_fail(MPIML_ERR_SERVICE, "expected a replica from 0 to %d, got %ld",
            (*service)->nreplicas - 1, number);
    return NULL;
  }
  if (number < 0) number = mi.index % (*service)->nreplicas;
  return &(*service)->replicas[number];
}

int mi_method_named(const mi_service *service, const char *name) {
  if (!name) return mi_fail(MPIML_ERR_METHOD, "expected the name of a method, got NULL");
  char names[LIST] = "";
  for (int i = 0; i < service->nmethods; ++i) {
    const mi_method *method = &service->methods[i];
    if (strcmp(method->name, name) != 0) {
      if (!method->stream) list(names, method->name);
    } else if (method->stream) {
      return mi_fail(MPIML_ERR_METHOD, "expected a method that returns once; this one is a stream");
    } else {
      return MPIML_OK;
    }
  }
  return mi_fail(MPIML_ERR_METHOD, "expected a public method of the service: %s",
                 *names ? names : "it has none");
}

int mi_server_named(const char *label) {
  char names[LIST] = "";
  const mi_service *service = label ? service_of(label, strlen(label)) : NULL;
  if (service && service->allowed)
    return mi_fail(MPIML_ERR_SERVICE,
                   "expected a parameter server; this one is a service. Use mpiml_call.");
  for (int i = 0; label && i < mi.program.nservers; ++i) {
    const mi_server *server = &mi.program.servers[i];
    if (!server->allowed) continue;
    if (strcmp(server->label, label) == 0) return MPIML_OK;
    list(names, server->label);
  }
  return mi_fail(MPIML_ERR_SERVICE,
                 "expected a parameter server that was given to this ExternalNode: %s. Give it the "
                 "handle in the Python program: ExternalNode(calls=...).",
                 *names ? names : "it was given none");
}
