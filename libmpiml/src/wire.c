/* wire.c: the bytes of docs/design/0008-external.md. */
#include "wire.h"

#include <string.h>

enum { WIRE_VERSION = 1, ARRAYS_VERSION = 1, ENTRY = 8, NOTE = 18, NOTE_TEXT = 4096 };

void mi_put(unsigned char *at, uint64_t value, int bytes) {
  for (int i = 0; i < bytes; ++i) at[i] = (unsigned char)(value >> (8 * i));
}

uint64_t mi_get(const unsigned char *at, int bytes) {
  uint64_t value = 0;
  for (int i = 0; i < bytes; ++i) value |= (uint64_t)at[i] << (8 * i);
  return value;
}

static size_t padded(size_t n) { return (n + 7) & ~(size_t)7; }

size_t mi_frame_write(unsigned char *slot, const mi_frame *frame, const size_t *lengths) {
  size_t size = MI_HEADER + frame->name_size + frame->body_size + 8 * (size_t)frame->buffers;
  if (size > MI_SLOT) return 0;
  slot[0] = WIRE_VERSION;
  slot[1] = (unsigned char)frame->kind;
  slot[2] = (unsigned char)frame->encoding;
  slot[3] = (unsigned char)frame->flags;
  mi_put(slot + 4, frame->source, 4);
  mi_put(slot + 8, frame->target, 4);
  mi_put(slot + 12, (uint64_t)frame->buffers, 4);
  mi_put(slot + 16, frame->id, 8);
  mi_put(slot + 24, frame->body_size, 8);
  mi_put(slot + 32, frame->name_size, 4);
  mi_put(slot + 36, frame->aux, 4);
  unsigned char *at = slot + MI_HEADER;
  if (frame->name_size) memcpy(at, frame->name, frame->name_size);
  at += frame->name_size;
  /* the body may have been written in place */
  if (frame->body_size && frame->body != at) memcpy(at, frame->body, frame->body_size);
  at += frame->body_size;
  for (int i = 0; i < frame->buffers; ++i) mi_put(at + 8 * i, lengths[i], 8);
  return size;
}

bool mi_frame_read(const unsigned char *bytes, size_t size, mi_frame *frame) {
  if (size < MI_HEADER || bytes[0] != WIRE_VERSION) return false;
  uint64_t buffers = mi_get(bytes + 12, 4), body = mi_get(bytes + 24, 8);
  uint64_t name = mi_get(bytes + 32, 4);
  if (buffers > MI_ENTRIES || body > size || MI_HEADER + name + body + 8 * buffers != size)
    return false;
  *frame = (mi_frame){
      .kind = bytes[1],
      .encoding = bytes[2],
      .flags = bytes[3],
      .source = (uint32_t)mi_get(bytes + 4, 4),
      .target = (uint32_t)mi_get(bytes + 8, 4),
      .aux = (uint32_t)mi_get(bytes + 36, 4),
      .id = mi_get(bytes + 16, 8),
      .name = (const char *)bytes + MI_HEADER,
      .name_size = (size_t)name,
      .body = bytes + MI_HEADER + name,
      .body_size = (size_t)body,
      .buffers = (int)buffers,
      .raw = bytes + MI_HEADER + name + body,
  };
  return true;
}

size_t mi_frame_length(const mi_frame *frame, int i) {
  return (size_t)mi_get(frame->raw + 8 * i, 8);
}

/* Bytes of an entry up to its elements. */
static size_t entry_head(const mi_entry *entry) {
  return padded(ENTRY + 8 * (size_t)entry->spec.ndim + entry->name_size);
}

size_t mi_body_write(unsigned char *body, size_t limit, int form, int count, mi_entry *entries) {
  size_t inlined = 0, size = ENTRY;
  for (int i = 0; i < count; ++i) {
    mi_entry *entry = &entries[i];
    entry->apart = inlined + entry->bytes > MI_INLINE;
    if (!entry->apart) inlined += entry->bytes;
    size += entry_head(entry) + (entry->apart ? 0 : padded(entry->bytes));
  }
  if (size > limit || count > MI_ENTRIES) return 0;
  memset(body, 0, ENTRY);
  body[0] = ARRAYS_VERSION;
  body[1] = (unsigned char)form;
  mi_put(body + 2, (uint64_t)count, 2);
  unsigned char *at = body + ENTRY;
  for (int i = 0; i < count; ++i) {
    const mi_entry *entry = &entries[i];
    size_t head = entry_head(entry);
    memset(at, 0, head);
    at[0] = (unsigned char)entry->spec.dtype;
    at[1] = (unsigned char)entry->spec.ndim;
    at[2] = (unsigned char)(entry->spec.order ? entry->spec.order : 'C');
    at[3] = entry->apart;
    mi_put(at + 4, entry->name_size, 4);
    for (int k = 0; k < entry->spec.ndim; ++k)
      mi_put(at + ENTRY + 8 * k, (uint64_t)entry->spec.shape[k], 8);
    if (entry->name_size)
      memcpy(at + ENTRY + 8 * entry->spec.ndim, entry->name, entry->name_size);
    at += head;
    if (entry->apart || entry->bytes == 0) continue;
    mi_pack(entry->array, at);
    size_t room = padded(entry->bytes);
    memset(at + entry->bytes, 0, room - entry->bytes);
    at += room;
  }
  return size;
}

/* Reads the entry at *at; false if it is none. */
static bool entry_read(const unsigned char **at, size_t *left, mi_entry *entry) {
  const unsigned char *from = *at;
  if (*left < ENTRY || from[1] > MPIML_MAX_DIMS) return false;
  *entry = (mi_entry){.apart = from[3] != 0, .name_size = (size_t)mi_get(from + 4, 4)};
  entry->spec.dtype = from[0];
  entry->spec.ndim = from[1];
  entry->spec.order = (char)from[2];
  if (entry->name_size > MI_NAME || (from[0] && mi_itemsize(from[0]) == 0)) return false;
  if (from[2] != 'C' && from[2] != 'F') return false;
  size_t head = entry_head(entry);
  if (*left < head) return false;
  for (int k = 0; k < entry->spec.ndim; ++k) {
    entry->spec.shape[k] = (int64_t)mi_get(from + ENTRY + 8 * k, 8);
    if (entry->spec.shape[k] < 0) return false;
  }
  entry->name = (const char *)from + ENTRY + 8 * entry->spec.ndim;
  entry->bytes = entry->spec.dtype ? mi_spec_bytes(&entry->spec) : 0;
  if (entry->bytes == SIZE_MAX) return false;
  *at += head;
  *left -= head;
  if (entry->apart || entry->bytes == 0) return true;
  if (*left < padded(entry->bytes)) return false;
  entry->elements = *at;
  *at += padded(entry->bytes);
  *left -= padded(entry->bytes);
  return true;
}

int mi_body_read(const mi_frame *frame, int *form, mi_entry *entries) {
  *form = MI_NOTHING;
  if (frame->encoding == MI_PLAIN) return frame->body_size == 0 && frame->buffers == 0 ? 0 : -1;
  const unsigned char *body = frame->body;
  if (frame->encoding != MI_ARRAYS || frame->body_size < ENTRY || body[0] != ARRAYS_VERSION)
    return -1;
  int count = (int)mi_get(body + 2, 2), apart = 0;
  if (count > MI_ENTRIES) return -1;
  *form = body[1];
  const unsigned char *at = body + ENTRY;
  size_t left = frame->body_size - ENTRY;
  for (int i = 0; i < count; ++i) {
    if (!entry_read(&at, &left, &entries[i])) return -1;
    if (!entries[i].apart) continue;
    if (apart >= frame->buffers || mi_frame_length(frame, apart) != entries[i].bytes) return -1;
    ++apart;
  }
  return apart == frame->buffers && left == 0 ? count : -1;
}

size_t mi_note_write(unsigned char *note, int reason, int status, uint32_t vertex,
                     uint32_t rank, const char *text) {
  size_t length = strnlen(text, NOTE_TEXT - NOTE);
  note[0] = (unsigned char)reason;
  note[1] = 0;
  mi_put(note + 2, (uint64_t)(uint32_t)status, 4);
  mi_put(note + 6, vertex, 4);
  mi_put(note + 10, rank, 4);
  mi_put(note + 14, length, 4);
  memcpy(note + NOTE, text, length);
  return NOTE + length;
}
