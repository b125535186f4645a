/* errors.c: the text of the last error of each thread. */
#include "errors.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

enum { TEXT = 8192 };

static _Thread_local char text[TEXT];
static int own_rank = -1;

void mi_errors_set_rank(int rank) { own_rank = rank; }

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
  size_t start = 0;
  if (own_rank >= 0) start = (size_t)snprintf(fresh, TEXT, "rank %d: ", own_rank);
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
