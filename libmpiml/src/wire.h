/* wire.h: the bytes of docs/design/0008-external.md. Bytes in, bytes out; no MPI. */
#ifndef MPIML_WIRE_H
#define MPIML_WIRE_H

#include "array.h"

enum {
  MI_HEADER = 40,
  MI_SLOT = 32768,        /* bytes of the largest frame */
  MI_INLINE = 16384,      /* bytes of elements in a body; more travels apart */
  MI_ENTRIES = 32,        /* arrays of a body */
  MI_NAME = 255,          /* bytes of an entry's name */
  MI_PLAIN = 0,           /* encodings: nothing, */
  MI_ARRAYS = 2,          /* arrays and names, */
  MI_ERRORS = 5,          /* an error */
  MI_NOTHING = 0,         /* forms of arrays: none, */
  MI_ONE = 1,             /* one, */
  MI_TUPLE = 2,           /* several in order, */
  MI_NAMES = 3,           /* several by name */
  MI_NESTED = 1           /* flag: takes no credit */
};

typedef enum mi_kind {
  MI_REQUEST = 1,
  MI_REPLY = 2,
  MI_ERROR = 3,
  MI_TOPIC = 9,
  MI_TOPIC_END = 10,
  MI_STOP_REQUEST = 18,
  MI_STOP = 19,
  MI_TOPIC_ACK = 29,
  MI_GUEST_LEAVE = 48,
  MI_GUEST_GONE = 49
} mi_kind;

/* A frame taken apart, or to be written. Pointers go into memory of others. */
typedef struct mi_frame {
  int kind, encoding, flags;
  uint32_t source, target, aux;
  uint64_t id;
  const char *name;
  size_t name_size;
  const unsigned char *body;
  size_t body_size;
  int buffers;              /* how many follow */
  const unsigned char *raw; /* of a frame that was read: their lengths, u64 each */
} mi_frame;

/* One array of a body, or only a name (dtype 0). */
typedef struct mi_entry {
  mi_spec spec;
  size_t bytes;                  /* of its elements */
  const char *name;              /* not terminated; name_size bytes */
  size_t name_size;
  const mpiml_array *array;      /* to be written: where the elements are */
  const unsigned char *elements; /* read: where they are in the body, if not apart */
  bool apart;                    /* set by mi_body_write and mi_body_read */
} mi_entry;

void mi_put(unsigned char *at, uint64_t value, int bytes);
uint64_t mi_get(const unsigned char *at, int bytes);

/* Writes header, name, body and lengths to `slot` of MI_SLOT bytes; returns the frame's size,
 * or 0 if it would be larger. */
size_t mi_frame_write(unsigned char *slot, const mi_frame *frame, const size_t *lengths);

/* Takes `size` bytes apart; false if they are no frame of this version. */
bool mi_frame_read(const unsigned char *bytes, size_t size, mi_frame *frame);

/* Length of buffer `i` of a frame that was read. */
size_t mi_frame_length(const mi_frame *frame, int i);

/* Writes a body of arrays, with small elements in it, to `limit` bytes; returns its size, or
 * 0 if it does not fit. Each entry that is `apart` afterwards is a buffer of its own. */
size_t mi_body_write(unsigned char *body, size_t limit, int form, int count, mi_entry *entries);

/* Takes the body of a frame of encoding 0 or MI_ARRAYS apart. Returns the number of entries
 * and sets *form; -1 if the bytes are no body of this version or do not fit the buffers. */
int mi_body_read(const mi_frame *frame, int *form, mi_entry *entries);

/* Writes a note, why a program is to stop; returns its size. The text is cut to fit 4 KiB. */
size_t mi_note_write(unsigned char *note, int reason, int status, uint32_t vertex,
                     uint32_t rank, const char *text);

#endif
