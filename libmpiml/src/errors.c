/* errors.c: the text of the last error of each thread. */
#include "errors.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

enum { TEXT = 8192 };

static _Thread_local char text[TEXT];
static _Thread_local const char *here, *first, *second, *part;
static _Thread_local int number; /* of the part */
static int own_rank = -1;

void mi_at(const char *function, const char *what, const char *more) {
  here = function;
  first = what;
  second = more;
  part = NULL;
}

void mi_in(const char *which, int of) {
  part = which;
  number = of;
}

/* How much is shown of a name: what is longer is no name of a program. */
static int shown(const char *name) {
  enum { MOST = 100 };
  size_t length = strlen(name);
  if (length <= MOST) return (int)length;
  length = MOST;
  while (length && ((unsigned char)name[length] & 0xC0) == 0x80) --length;
  return (int)length;
}

void mi_errors_set_rank(int rank) { own_rank = rank; }

/* "mpiml_call("net", "predict") on rank 3: "; returns its length. */
static size_t say_where(char *to) {
  if (!here) return 0;
  char rank[32] = "", names[256] = "", array[64] = "";
  if (own_rank >= 0) snprintf(rank, sizeof rank, " on rank %d", own_rank);
  if (first && second) snprintf(names, sizeof names, "(\"%.*s\", \"%.*s\")", shown(first), first, shown(second),
             second);
  else if (first) snprintf(names, sizeof names, "(\"%.*s\")", shown(first), first);
  if (part) snprintf(array, sizeof array, ", %s[%d]", part, number);
  return (size_t)snprintf(to, TEXT, "%s%s%s%s: ", here, names, rank, array);
}

/* Cuts a text that did not fit before an unfinished UTF-8 character. */
static void close_text(size_t length) {
  if (length < TEXT - 1) return;
  size_t end = TEXT - 1;
  while (end > 0 && ((unsigned char)text[end - 1] & 0xC0) == 0x80) --end;
  if (end > 0 && (unsigned char)text[end - 1] >= 0xC0) --end;
  text[end] = '\0';
}

int mi_fail(int code, const char *format, ...) {
  char fresh[TEXT];
  size_t start = say_where(fresh);
  va_list arguments;
  va_start(arguments, format);
  int written = vsnprintf(fresh + start, TEXT - start, format, arguments);
  va_end(arguments);
  memcpy(text, fresh, TEXT); /* at the end: an argument may be the former text */
  close_text(start + (written < 0 ? 0 : (size_t)written));
  return code;
}

const char *mpiml_error(void) { return text; }

const char *mpiml_version(void) { return MPIML_VERSION; }
