/* parameters.c: parameters and gradients, by way of the keeper, which is a worker's client. */
#include "calls.h"
#include "errors.h"
#include "names.h"
#include "receive.h"
#include "state.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

static const char VERSION[] = "@version";

/* "pull:LABEL"; MPIML_OK if this node has the server and the names are fit to be sent. */
static int prepare(const char *verb, const char *server, const char *name, char *method,
                   size_t size) {
  int code = mi_enter(false);
  if (code == MPIML_OK) code = mi_server_named(server);
  if (code != MPIML_OK) return code;
  if (!name || strlen(name) > MI_NAME)
    return mi_fail(MPIML_ERR_USAGE, "expected a name of at most %d bytes, got %s", MI_NAME,
                   name ? "a longer one" : "NULL");
  if ((size_t)snprintf(method, size, "%s:%s", verb, server) >= size)
    return mi_fail(MPIML_ERR_USAGE, "expected a label of less than %zu bytes", size);
  return MPIML_OK;
}

static const mi_entry *version_in(int count, const mi_entry *entries) {
  for (int i = 0; i < count; ++i) {
    const mi_entry *entry = &entries[i];
    if (entry->name_size == strlen(VERSION) &&
        memcmp(entry->name, VERSION, entry->name_size) == 0 && entry->elements &&
        entry->spec.dtype == MPIML_INT64 && entry->spec.ndim == 0)
      return entry;
  }
  return NULL;
}

int mpiml_pull(const char *server, const char *name, mpiml_array *into, int64_t *version) {
  mi_at("mpiml_pull", server, name);
  char method[512];
  int code = prepare("pull", server, name, method, sizeof method);
  if (code == MPIML_OK) code = mi_check(into, NULL);
  if (code != MPIML_OK) return code;
  if (!version) return mi_fail(MPIML_ERR_USAGE, "expected memory for the version, got NULL");
  mi_entry wanted = {.name = name, .name_size = strlen(name)};
  mi_parcel *reply;
  code = mi_ask(mi.keeper, mi.program.vertex, method, MI_NAMES, 1, &wanted, INFINITY, &reply);
  if (code != MPIML_OK) return code;
  mi_entry entries[MI_ENTRIES];
  mpiml_array *targets[MI_ENTRIES] = {into};
  int form, count = mi_body_read(&reply->frame, &form, entries);
  const mi_entry *told = version_in(count, entries);
  if (count != 2 || told != &entries[1])
    code = mi_fail(MPIML_ERR_DTYPE, "expected an array and a version, got a reply that is neither");
  if (code == MPIML_OK) code = mi_match(into, &entries[0].spec);
  if (code == MPIML_OK) code = mi_receive(reply, count, entries, targets, INFINITY);
  if (code == MPIML_OK) *version = (int64_t)mi_get(told->elements, 8);
  mi_reply_done(reply);
  return code;
}

int mpiml_push(const char *server, const char *name, const mpiml_array *gradient,
               int64_t version) {
  mi_at("mpiml_push", server, name);
  char method[512];
  int code = prepare("push", server, name, method, sizeof method);
  if (code != MPIML_OK) return code;
  mi_entry entries[2];
  mpiml_array number = mpiml_array_c(&version, MPIML_INT64, 0, NULL);
  mi_argument(&number, &entries[0]);
  code = mi_argument(gradient, &entries[1]);
  if (code != MPIML_OK) return code;
  entries[0].name = VERSION;
  entries[0].name_size = strlen(VERSION);
  entries[1].name = name;
  entries[1].name_size = strlen(name);
  mi_parcel *reply;
  code = mi_ask(mi.keeper, mi.program.vertex, method, MI_NAMES, 2, entries, INFINITY, &reply);
  if (code == MPIML_OK) mi_reply_done(reply);
  return code;
}
