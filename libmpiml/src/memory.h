/* memory.h: blocks of memory that are used again, and that several can hold. */
#ifndef MPIML_MEMORY_H
#define MPIML_MEMORY_H

#include <stddef.h>

typedef struct mi_block {
  struct mi_block *next; /* of those that are free */
  size_t size;           /* bytes of data */
  int holders;
  unsigned char *data;   /* aligned to 64 bytes */
} mi_block;

/* A block of `size` bytes or more with one holder; NULL without memory. */
mi_block *mi_take(size_t size);

/* One holder more. */
mi_block *mi_hold(mi_block *block);

/* One holder less; the last one lets the block be used again. NULL is ignored. */
void mi_drop(mi_block *block);

/* Gives all free blocks back to the system. */
void mi_memory_clear(void);

#endif
