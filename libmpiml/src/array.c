/* array.c: sizes and orders of arrays, and what is said when two do not fit. */
#include "array.h"

#include "copy.h"
#include "errors.h"

#include <stdio.h>
#include <string.h>

static const struct {
  const char *name;
  size_t size;
} DTYPES[] = {
    [MPIML_BOOL] = {"bool", 1},           [MPIML_INT8] = {"int8", 1},
    [MPIML_INT16] = {"int16", 2},         [MPIML_INT32] = {"int32", 4},
    [MPIML_INT64] = {"int64", 8},         [MPIML_UINT8] = {"uint8", 1},
    [MPIML_UINT16] = {"uint16", 2},       [MPIML_UINT32] = {"uint32", 4},
    [MPIML_UINT64] = {"uint64", 8},       [MPIML_FLOAT16] = {"float16", 2},
    [MPIML_FLOAT32] = {"float32", 4},     [MPIML_FLOAT64] = {"float64", 8},
    [MPIML_COMPLEX64] = {"complex64", 8}, [MPIML_COMPLEX128] = {"complex128", 16},
};
enum { NDTYPES = sizeof DTYPES / sizeof DTYPES[0] };

size_t mi_itemsize(int dtype) {
  return dtype > 0 && dtype < (int)NDTYPES ? DTYPES[dtype].size : 0;
}

const char *mi_dtype_name(int dtype) {
  return mi_itemsize(dtype) ? DTYPES[dtype].name : "no dtype";
}

/* The product of itemsize and lengths; SIZE_MAX where it does not fit a ptrdiff_t. */
static size_t bytes_of(int dtype, int ndim, const int64_t *shape) {
  size_t bytes = mi_itemsize(dtype);
  for (int i = 0; i < ndim; ++i)
    if (shape[i] == 0) return 0;
  for (int i = 0; i < ndim; ++i) {
    if ((uint64_t)shape[i] > (uint64_t)PTRDIFF_MAX / bytes) return SIZE_MAX;
    bytes *= (size_t)shape[i];
  }
  return bytes;
}

size_t mi_spec_bytes(const mi_spec *spec) {
  return bytes_of(spec->dtype, spec->ndim, spec->shape);
}

/* Strides of dense memory in order 'C' or 'F'. */
static void dense_strides(char order, size_t item, int ndim, const int64_t *shape,
                          int64_t *strides) {
  uint64_t step = item; /* of shapes that nothing can hold, which are refused later, it wraps */
  for (int k = 0; k < ndim; ++k) {
    int i = order == 'F' ? k : ndim - 1 - k;
    strides[i] = (int64_t)step;
    step *= shape[i] > 0 ? (uint64_t)shape[i] : 1;
  }
}

/* All strides 0 stands for row order. */
static bool implied(const mpiml_array *x) {
  for (int i = 0; i < x->ndim; ++i)
    if (x->strides[i] != 0) return false;
  return true;
}

static void strides_of(const mpiml_array *x, int64_t *strides) {
  if (implied(x))
    dense_strides('C', mi_itemsize(x->dtype), x->ndim, x->shape, strides);
  else
    memcpy(strides, x->strides, sizeof(int64_t) * (size_t)x->ndim);
}

int mi_check(const mpiml_array *x, size_t *bytes) {
  if (x == NULL) return mi_fail(MPIML_ERR_USAGE, "expected an array, got NULL");
  if (x->dtype == MI_OF_FORTRAN)
    return mi_fail(MPIML_ERR_DTYPE,
                   "expected integer(int8 to int64), real(real32, real64), complex of these, or "
                   "logical(c_bool), got another type or kind");
  if (mi_itemsize(x->dtype) == 0)
    return mi_fail(MPIML_ERR_DTYPE, "expected a dtype from %d to %d (MPIML_FLOAT64, ...), got %d",
                   MPIML_BOOL, NDTYPES - 1, x->dtype);
  if (x->ndim < 0 || x->ndim > MPIML_MAX_DIMS)
    return mi_fail(MPIML_ERR_SHAPE, "expected 0 to %d dimensions and their lengths, got %d",
                   MPIML_MAX_DIMS, x->ndim);
  for (int i = 0; i < x->ndim; ++i)
    if (x->shape[i] == MI_ASSUMED)
      return mi_fail(MPIML_ERR_SHAPE, "an assumed-size array, x(*), does not know its last length: "
                                      "pass x(1:n), or x(1:n, 1:m)");
    else if (x->shape[i] < 0)
      return mi_fail(MPIML_ERR_SHAPE, "expected lengths of 0 or more, got shape[%d] = %lld", i,
                     (long long)x->shape[i]);
  size_t total = bytes_of(x->dtype, x->ndim, x->shape);
  if (total == SIZE_MAX)
    return mi_fail(MPIML_ERR_SHAPE, "expected an array that memory can hold; this shape is too large");
  if (total > 0 && x->data == NULL)
    return mi_fail(MPIML_ERR_USAGE, "expected memory of %zu bytes, got data = NULL", total);
  if (bytes) *bytes = total;
  return MPIML_OK;
}

static bool dense_in(const mpiml_array *x, char order) {
  int64_t strides[MPIML_MAX_DIMS];
  dense_strides(order, mi_itemsize(x->dtype), x->ndim, x->shape, strides);
  for (int i = 0; i < x->ndim; ++i)
    if (x->shape[i] > 1 && x->strides[i] != strides[i]) return false;
  return true;
}

char mi_order(const mpiml_array *x) {
  if (implied(x) || bytes_of(x->dtype, x->ndim, x->shape) == 0 || dense_in(x, 'C')) return 'C';
  return dense_in(x, 'F') ? 'F' : 0;
}

mi_spec mi_spec_of(const mpiml_array *x) {
  mi_spec spec = {.dtype = x->dtype, .ndim = x->ndim, .order = mi_order(x)};
  if (spec.order == 0) spec.order = 'C';
  memcpy(spec.shape, x->shape, sizeof(int64_t) * (size_t)x->ndim);
  return spec;
}

void mi_pack(const mpiml_array *x, void *dense) {
  int64_t from[MPIML_MAX_DIMS], to[MPIML_MAX_DIMS];
  size_t item = mi_itemsize(x->dtype);
  char order = mi_order(x);
  if (order) {
    size_t bytes = bytes_of(x->dtype, x->ndim, x->shape);
    if (bytes) memcpy(dense, x->data, bytes);
    return;
  }
  strides_of(x, from);
  dense_strides('C', item, x->ndim, x->shape, to);
  mi_copy(x->ndim, x->shape, item, dense, to, x->data, from);
}

void mi_unpack(mpiml_array *x, char order, const void *dense) {
  int64_t from[MPIML_MAX_DIMS], to[MPIML_MAX_DIMS];
  size_t item = mi_itemsize(x->dtype), bytes = bytes_of(x->dtype, x->ndim, x->shape);
  if (bytes == 0) return;
  dense_strides(order, item, x->ndim, x->shape, from);
  strides_of(x, to);
  mi_copy(x->ndim, x->shape, item, x->data, to, dense, from);
}

int mi_match(const mpiml_array *into, const mi_spec *got) {
  if (into->dtype != got->dtype)
    return mi_fail(MPIML_ERR_DTYPE,
                   "expected %s, the dtype of your memory, got %s. dtypes are never converted: make "
                   "one side use the other's.",
                   mi_dtype_name(into->dtype), mi_dtype_name(got->dtype));
  bool same = into->ndim == got->ndim;
  for (int i = 0; same && i < got->ndim; ++i) same = into->shape[i] == got->shape[i];
  if (same) return MPIML_OK;
  char expected[192], received[192];
  return mi_fail(MPIML_ERR_SHAPE, "expected shape %s, that of your memory, got %s",
                 mi_shape_text(into->ndim, into->shape, expected, sizeof expected),
                 mi_shape_text(got->ndim, got->shape, received, sizeof received));
}

char *mi_shape_text(int ndim, const int64_t *shape, char *text, size_t size) {
  size_t end = (size_t)snprintf(text, size, "(");
  for (int i = 0; i < ndim && end < size; ++i)
    end += (size_t)snprintf(text + end, size - end, i ? ", %lld" : "%lld", (long long)shape[i]);
  if (end < size) snprintf(text + end, size - end, ndim == 1 ? ",)" : ")");
  return text;
}

static mpiml_array described(const void *data, int dtype, int ndim, const int64_t *shape,
                             char order) {
  mpiml_array x = {.data = (void *)(uintptr_t)data, .dtype = dtype, .ndim = ndim};
  if (ndim <= 0 || ndim > MPIML_MAX_DIMS) return x;
  if (shape == NULL) {
    x.ndim = -1; /* refused where it is used */
    return x;
  }
  memcpy(x.shape, shape, sizeof(int64_t) * (size_t)ndim);
  if (order == 'F' && mi_itemsize(dtype)) dense_strides('F', mi_itemsize(dtype), ndim, shape, x.strides);
  return x;
}

mpiml_array mpiml_array_c(const void *data, int dtype, int ndim, const int64_t *shape) {
  return described(data, dtype, ndim, shape, 'C');
}

mpiml_array mpiml_array_f(const void *data, int dtype, int ndim, const int64_t *shape) {
  return described(data, dtype, ndim, shape, 'F');
}
