/* record.h: what ranks tell of themselves when they attach. */
#ifndef MPIML_RECORD_H
#define MPIML_RECORD_H

#include <stdbool.h>

enum { MI_RECORD = 512, MI_LABEL = 43 };

/* Where this rank is among those that attach. */
typedef struct mi_place {
  int guest, guests; /* its number among guests, and how many there are */
  int label;         /* number of its label among theirs */
  int index;         /* its number among those of its label */
  int keeper;        /* rank of the Python rank that keeps it */
  int root;          /* rank of the lowest Python rank */
} mi_place;

/* Writes this rank's record. A label of NULL: it will not attach, since it was called wrongly. */
void mi_record_write(unsigned char *record, const char *label);

/* Whether a label can be that of a node: 1 to MI_LABEL bytes of UTF-8. */
bool mi_label_good(const char *label);

/* MPIML_OK, or the error for which all ranks refuse. Local: all have the same records. */
int mi_records_check(const unsigned char *records, int size, int rank);

mi_place mi_records_place(const unsigned char *records, int size, int rank);

#endif
