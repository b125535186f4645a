/* state.c: what the library knows in this process, and whether a function may go on. */
#include "state.h"

#include "errors.h"
#include "link.h"
#include "wire.h"

#include <stdlib.h>
#include <string.h>

mi_state mi = {.rank = -1};

int mi_enter(bool after_stop) {
  if (mi.phase == MI_BEFORE)
    return mi_fail(MPIML_ERR_NOT_ATTACHED, "expected to be called after mpiml_attach");
  if (mi.phase != MI_ATTACHED)
    return mi_fail(MPIML_ERR_LEFT, "expected to be called before mpiml_leave: this rank has left");
  int code = mi_poll();
  if (code != MPIML_OK || after_stop) return code;
  return mi_stopped();
}

int mi_stopped(void) {
  const char *reason = mi.reason ? mi.reason : "";
  if (mi.stop == MPIML_STOPPED)
    return mi_fail(mi.stop, "the program is stopping%s%s. End your loop and call mpiml_leave.",
                   *reason ? ": " : "", reason);
  if (mi.stop)
    return mi_fail(mi.stop, "the program has failed%s%s", *reason ? ": " : "", reason);
  return MPIML_OK;
}

void mi_on_stop(const unsigned char *note, size_t size) {
  enum { HEAD = 18, FINISHED = 0, REQUESTED = 1, SIGNALLED = 3, TIME = 4 };
  if (size < HEAD || mi.stop == MPIML_ERR_FAILED) return;
  int reason = note[0];
  bool benign = reason == FINISHED || reason == REQUESTED || reason == SIGNALLED || reason == TIME;
  mi.stop = benign ? MPIML_STOPPED : MPIML_ERR_FAILED;
  size_t length = (size_t)mi_get(note + 14, 4);
  if (length > size - HEAD) length = size - HEAD;
  char *text = malloc(length + 1);
  if (!text) return;
  memcpy(text, note + HEAD, length);
  text[length] = '\0';
  free(mi.reason);
  mi.reason = text;
}

int mi_partner(int rank) {
  for (int i = 0; i < mi.npartners; ++i)
    if (mi.partners[i] == rank) return MPIML_OK;
  int *more = realloc(mi.partners, sizeof(int) * (size_t)(mi.npartners + 1));
  if (!more) return mi_fail(MPIML_ERR_MEMORY, "no memory for a table of ranks");
  mi.partners = more;
  mi.partners[mi.npartners++] = rank;
  return MPIML_OK;
}
