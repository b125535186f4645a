/* errors.h: the text of the last error of each thread. */
#ifndef MPIML_ERRORS_H
#define MPIML_ERRORS_H

#include <mpiml.h>

/* Sets the text and returns `code`. The format is printf's. */
int mi_fail(int code, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Number of this rank in messages; -1, the value before attach, leaves it out. */
void mi_errors_set_rank(int rank);

#endif
