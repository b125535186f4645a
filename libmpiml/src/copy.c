/* copy.c: copies between two sets of strides.
 *
 * Dimensions that are one run in both are joined, so dense copies become one memcpy. The two
 * that run fastest, one in each array, are then copied in tiles: a transpose reads and writes
 * whole cache lines that way. The others are counted through like an odometer.
 */
#include "copy.h"

#include <mpiml.h>
#include <string.h>

enum { TILE = 16 }; /* elements: at most 16 x 16 x 16 bytes of each side */

typedef struct {
  int64_t length, to, from;
} axis;

static int64_t magnitude(int64_t x) { return x < 0 ? -x : x; }

static void swap(axis *a, axis *b) {
  axis t = *a;
  *a = *b;
  *b = t;
}

/* Slowest first, by the strides of the target. */
static void sort(axis *axes, int n) {
  for (int i = 1; i < n; ++i)
    for (int k = i; k > 0 && magnitude(axes[k].to) > magnitude(axes[k - 1].to); --k)
      swap(&axes[k], &axes[k - 1]);
}

/* Joins neighbours that are one run in both arrays; returns how many axes are left. */
static int join(axis *axes, int n) {
  int kept = 0;
  for (int i = 1; i < n; ++i) {
    axis *outer = &axes[kept], *inner = &axes[i];
    if (outer->to == inner->to * inner->length && outer->from == inner->from * inner->length)
      *outer = (axis){outer->length * inner->length, inner->to, inner->from};
    else
      axes[++kept] = *inner;
  }
  return kept + 1;
}

#define ROW(NAME, SIZE)                                                                    \
  static void NAME(char *to, int64_t to_step, const char *from, int64_t from_step,          \
                   int64_t n) {                                                             \
    for (int64_t i = 0; i < n; ++i) {                                                       \
      memcpy(to, from, SIZE);                                                               \
      to += to_step;                                                                        \
      from += from_step;                                                                    \
    }                                                                                       \
  }
ROW(row1, 1)
ROW(row2, 2)
ROW(row4, 4)
ROW(row8, 8)
ROW(row16, 16)

static void row(size_t item, char *to, int64_t to_step, const char *from, int64_t from_step,
                int64_t n) {
  if (to_step == (int64_t)item && from_step == (int64_t)item) {
    memcpy(to, from, item * (size_t)n);
    return;
  }
  switch (item) {
    case 1: row1(to, to_step, from, from_step, n); break;
    case 2: row2(to, to_step, from, from_step, n); break;
    case 4: row4(to, to_step, from, from_step, n); break;
    case 8: row8(to, to_step, from, from_step, n); break;
    default: row16(to, to_step, from, from_step, n);
  }
}

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* Copies the last two axes. */
static void plane(size_t item, char *to, const char *from, const axis *a, const axis *b) {
  if (b->to == (int64_t)item && b->from == (int64_t)item) {
    for (int64_t i = 0; i < a->length; ++i)
      row(item, to + i * a->to, b->to, from + i * a->from, b->from, b->length);
    return;
  }
  for (int64_t i = 0; i < a->length; i += TILE) {
    int64_t rows = least(TILE, a->length - i);
    for (int64_t j = 0; j < b->length; j += TILE) {
      int64_t columns = least(TILE, b->length - j);
      for (int64_t k = i; k < i + rows; ++k)
        row(item, to + k * a->to + j * b->to, b->to, from + k * a->from + j * b->from, b->from,
            columns);
    }
  }
}

void mi_copy(int ndim, const int64_t *shape, size_t item, void *to, const int64_t *to_strides,
             const void *from, const int64_t *from_strides) {
  axis axes[MPIML_MAX_DIMS + 2] = {{1, 0, 0}, {1, 0, 0}}; /* two at least */
  int n = 0;
  for (int i = 0; i < ndim; ++i) {
    if (shape[i] == 0) return;
    if (shape[i] > 1) axes[n++] = (axis){shape[i], to_strides[i], from_strides[i]};
  }
  sort(axes, n);
  if (n > 1) n = join(axes, n);
  if (n < 2) { /* pad in front */
    axis only = n ? axes[0] : (axis){1, 0, 0};
    axes[0] = (axis){1, 0, 0};
    axes[1] = only;
    n = 2;
  }
  int fastest = 0; /* of the source, among all axes but the target's fastest */
  for (int i = 1; i < n - 1; ++i)
    if (magnitude(axes[i].from) <= magnitude(axes[fastest].from)) fastest = i;
  for (int i = fastest; i < n - 2; ++i) swap(&axes[i], &axes[i + 1]);
  int64_t at[MPIML_MAX_DIMS] = {0};
  char *target = to;
  const char *source = from;
  for (;;) {
    plane(item, target, source, &axes[n - 2], &axes[n - 1]);
    int i = n - 3;
    for (; i >= 0; --i) {
      target += axes[i].to;
      source += axes[i].from;
      if (++at[i] < axes[i].length) break;
      target -= axes[i].to * axes[i].length;
      source -= axes[i].from * axes[i].length;
      at[i] = 0;
    }
    if (i < 0) return;
  }
}
