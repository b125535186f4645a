/* errors.h: the text of the last error of each thread. */
#ifndef MPIML_ERRORS_H
#define MPIML_ERRORS_H

#include <mpiml.h>

/* Says which function the caller is in, and with which names, for texts; NULL for none. The
 * strings must live until the function returns. */
void mi_at(const char *function, const char *what, const char *more);

/* Which of several arrays is looked at, as "in" and 1; NULL: none, as after mi_at. */
void mi_in(const char *which, int of);

/* Sets the text, after where it happened and on which rank, and returns `code`. */
int mi_fail(int code, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Number of this rank in texts; -1, the value before attach, leaves it out. */
void mi_errors_set_rank(int rank);

#endif
