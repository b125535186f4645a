/* copy.h: copies between two sets of strides. */
#ifndef MPIML_COPY_H
#define MPIML_COPY_H

#include <stddef.h>
#include <stdint.h>

/* Copies elements of `item` bytes (1, 2, 4, 8 or 16) of an array of `ndim` <= MPIML_MAX_DIMS
 * dimensions; strides are in bytes, of any sign. */
void mi_copy(int ndim, const int64_t *shape, size_t item, void *to, const int64_t *to_strides,
             const void *from, const int64_t *from_strides);

#endif
