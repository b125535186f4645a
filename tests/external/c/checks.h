/* checks.h: for the programs of the tests: what must hold, and how a failure is told. */
#ifndef CHECKS_H
#define CHECKS_H

#include <mpiml.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The condition must hold; else all ranks end, and the text says where. */
#define CHECK(condition)                                                              \
  do {                                                                                \
    if (!(condition)) {                                                               \
      fprintf(stderr, "%s:%d: not so: %s\n  mpiml_error: %s\n", __FILE__, __LINE__,   \
              #condition, mpiml_error());                                             \
      MPI_Abort(MPI_COMM_WORLD, 3);                                                   \
    }                                                                                 \
  } while (0)

/* The call must return the code. */
#define GIVES(code, call)                                                             \
  do {                                                                                \
    int got_ = (call);                                                                \
    if (got_ != (code)) {                                                             \
      fprintf(stderr, "%s:%d: %s\n  expected %d, got %d: %s\n", __FILE__, __LINE__,   \
              #call, (int)(code), got_, mpiml_error());                               \
      MPI_Abort(MPI_COMM_WORLD, 3);                                                   \
    }                                                                                 \
  } while (0)

/* The call must return the code, and the text contain a part. */
#define SAYS(code, part, call)                                                        \
  do {                                                                                \
    GIVES(code, call);                                                                \
    if (!strstr(mpiml_error(), part)) {                                               \
      fprintf(stderr, "%s:%d: %s\n  expected a text with \"%s\", got: %s\n", __FILE__, \
              __LINE__, #call, part, mpiml_error());                                  \
      MPI_Abort(MPI_COMM_WORLD, 3);                                                   \
    }                                                                                 \
  } while (0)

#endif
