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

/* The text without empty lines around it. */
static const char *stripped(const char *text, size_t *size) {
  while (*size && strchr(" \r\n", text[0])) ++text, --*size;
  while (*size && strchr(" \r\n", text[*size - 1])) --*size;
  return text;
}

/* The length of a text, cut before a character that would go beyond `most` bytes. */
static size_t up_to(const char *text, size_t size, size_t most) {
  if (size <= most) return size;
  while (most && ((unsigned char)text[most] & 0xC0) == 0x80) --most;
  return most;
}

/* What is kept of a reason: first its last line, where a traceback says what went wrong, then all,
 * or its first line and its end. NULL without memory. */
static char *shortened(const char *text, size_t size) {
  enum { MOST = 6000, LINE = 1000 };
  text = stripped(text, &size);
  const char *end = text + size, *last = end, *newline = memchr(text, '\n', size);
  while (last > text && last[-1] != '\n') --last;
  size_t first = up_to(text, newline ? (size_t)(newline - text) : size, LINE), tail = size;
  const char *from = text;
  if (size > MOST) {
    tail = MOST;
    from = end - tail;
    while (tail && ((unsigned char)*from & 0xC0) == 0x80) ++from, --tail; /* a whole character */
  }
  size_t line = up_to(last, (size_t)(end - last), LINE);
  char *made = malloc(line + first + tail + 16);
  if (!made) return NULL;
  char *to = made;
  if (newline) {
    memcpy(to, last, line);
    to += line;
    *to++ = '\n';
  }
  if (from > text) {
    memcpy(to, text, first);
    memcpy(to + first, "\n...\n", 5);
    to += first + 5;
  }
  memcpy(to, from, tail);
  to[tail] = '\0';
  return made;
}

void mi_on_stop(const unsigned char *note, size_t size) {
  enum { HEAD = 18, FINISHED = 0, REQUESTED = 1, SIGNALLED = 3, TIME = 4 };
  static const char unread[] = "its reason cannot be read";
  if (mi.stop == MPIML_ERR_FAILED) return;
  int reason = size < HEAD ? -1 : note[0];
  bool benign = reason == FINISHED || reason == REQUESTED || reason == SIGNALLED || reason == TIME;
  mi.stop = benign ? MPIML_STOPPED : MPIML_ERR_FAILED;
  size_t length = sizeof unread - 1;
  const char *told = unread;
  if (size >= HEAD) {
    length = (size_t)mi_get(note + 14, 4);
    told = (const char *)note + HEAD;
    if (length > size - HEAD) length = size - HEAD;
  }
  char *text = shortened(told, length);
  if (!text) return;
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
