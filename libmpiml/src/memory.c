/* memory.c: blocks of memory that are used again, and that several can hold.
 *
 * Fresh memory costs a page fault for each 4 KiB, several times what a copy into it costs. So
 * blocks are kept by size, in steps of a quarter of a power of two: at most a fifth is unused.
 */
#include "memory.h"

#include <stdint.h>
#include <stdlib.h>

enum { ALIGN = 64, STEPS = 4, CLASSES = 64 * STEPS };
static const size_t SMALLEST = 512;
static const size_t KEPT = (size_t)1 << 28; /* bytes that stay free at most */

static mi_block *free_blocks[CLASSES];
static size_t kept;

/* The class of a size, and the bytes of the class. */
static int class_of(size_t size, size_t *bytes) {
  size_t base = SMALLEST;
  int number = 0;
  if (size <= base) {
    *bytes = base;
    return 0;
  }
  while (base <= SIZE_MAX / 4 && 2 * base < size) {
    base *= 2;
    number += STEPS;
  }
  for (int step = 1; step <= STEPS; ++step) {
    *bytes = base + base / STEPS * (size_t)step;
    if (*bytes >= size) return number + step;
  }
  *bytes = size;
  return CLASSES - 1;
}

mi_block *mi_take(size_t size) {
  size_t bytes;
  int number = class_of(size, &bytes);
  mi_block *block = free_blocks[number];
  if (block && block->size >= size) {
    free_blocks[number] = block->next;
    kept -= block->size;
  } else {
    block = malloc(sizeof *block);
    if (!block) return NULL;
    block->size = bytes;
    block->data = aligned_alloc(ALIGN, (bytes + ALIGN - 1) / ALIGN * ALIGN);
    if (!block->data) {
      free(block);
      return NULL;
    }
  }
  block->next = NULL;
  block->holders = 1;
  return block;
}

mi_block *mi_hold(mi_block *block) {
  ++block->holders;
  return block;
}

void mi_drop(mi_block *block) {
  if (!block || --block->holders > 0) return;
  if (kept + block->size > KEPT) {
    free(block->data);
    free(block);
    return;
  }
  size_t bytes;
  int number = class_of(block->size, &bytes);
  block->next = free_blocks[number];
  free_blocks[number] = block;
  kept += block->size;
}

void mi_memory_clear(void) {
  for (int i = 0; i < CLASSES; ++i)
    while (free_blocks[i]) {
      mi_block *block = free_blocks[i];
      free_blocks[i] = block->next;
      free(block->data);
      free(block);
    }
  kept = 0;
}
