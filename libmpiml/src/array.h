/* array.h: what arrays are: sizes, orders, and copies between any two sets of strides. */
#ifndef MPIML_ARRAY_H
#define MPIML_ARRAY_H

#include <mpiml.h>
#include <stdbool.h>
#include <stddef.h>

/* What travels of an array besides its elements: elements are dense, in one of two orders. */
typedef struct mi_spec {
  int dtype;
  int ndim;
  char order; /* 'C' or 'F' */
  int64_t shape[MPIML_MAX_DIMS];
} mi_spec;

/* What the Fortran module (fortran/shim.c) puts where C has no word: a type or kind that is no
 * dtype, and the last length of an assumed-size array. */
#define MI_OF_FORTRAN (-1)
#define MI_ASSUMED INT64_MIN

/* Bytes of one element; 0 for what is no dtype. */
size_t mi_itemsize(int dtype);

/* NumPy's name of a dtype, as in "float64". */
const char *mi_dtype_name(int dtype);

/* MPIML_OK if `x` describes an array, else an error. `bytes`, if not NULL, receives the size
 * of its elements together. */
int mi_check(const mpiml_array *x, size_t *bytes);

/* 'C' or 'F' if the elements are dense in that order ('C' if in both), else 0. */
char mi_order(const mpiml_array *x);

/* Bytes of all elements of a spec; SIZE_MAX if no memory can hold them. */
size_t mi_spec_bytes(const mi_spec *spec);

/* The spec under which `x` travels: in its own order if dense, else packed in C order. */
mi_spec mi_spec_of(const mpiml_array *x);

/* Copies the elements of `x` to dense memory, in the order of its spec. */
void mi_pack(const mpiml_array *x, void *dense);

/* Copies dense elements in order 'C' or 'F' into `x`, whose dtype and shape are theirs. */
void mi_unpack(mpiml_array *x, char order, const void *dense);

/* MPIML_OK if `into` has the dtype and shape of `got`; else an error that names both. */
int mi_match(const mpiml_array *into, const mi_spec *got);

/* Writes a shape as Python does, "(3, 4)", and returns `text`. */
char *mi_shape_text(int ndim, const int64_t *shape, char *text, size_t size);

#endif
