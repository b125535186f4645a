/* record.c: what ranks tell of themselves when they attach, and what follows from it. */
#define _GNU_SOURCE /* uname */
#include "record.h"

#include "errors.h"
#include "wire.h"

#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/utsname.h>

enum {
  STATE = 1,
  FACTS = 52,
  HOST_SIZE = FACTS + 2,
  HOST = FACTS + 32,
  HOST_ROOM = 64,
  VERSION = 412,
  VERSION_ROOM = 16,
  LIBRARY = 428,
  LIBRARY_ROOM = 40,
  LABEL = 468,
  GUEST = 3
};

/* Stands for the version of a rank that was called wrongly: so Python ranks refuse it, too. */
static const char WRONG[VERSION_ROOM] = "wrong arguments";

/* "Open MPI v5.0.10" of the long text that an MPI library has about itself. */
static void library_name(char *name) {
  char text[MPI_MAX_LIBRARY_VERSION_STRING] = "";
  int length = 0;
  if (MPI_Get_library_version(text, &length) != MPI_SUCCESS) text[0] = '\0';
  const char *start = text + strspn(text, " \t");
  size_t end = strcspn(start, ",\r\n");
  while (end && (start[end - 1] == ' ' || start[end - 1] == '\t')) --end;
  if (end > LIBRARY_ROOM - 1) end = LIBRARY_ROOM - 1;
  memcpy(name, start, end);
}

void mi_record_write(unsigned char *record, const char *label) {
  memset(record, 0, MI_RECORD);
  record[0] = 1;
  record[STATE] = GUEST;
  record[FACTS] = 1;
  struct utsname host;
  if (uname(&host) == 0) {
    size_t length = strnlen(host.nodename, HOST_ROOM);
    memcpy(record + HOST, host.nodename, length);
    record[HOST_SIZE] = (unsigned char)length;
  }
  if (label) memcpy(record + VERSION, MPIML_VERSION, sizeof MPIML_VERSION);
  else memcpy(record + VERSION, WRONG, sizeof WRONG);
  library_name((char *)record + LIBRARY);
  if (label) memcpy(record + LABEL, label, strlen(label));
}

bool mi_label_good(const char *label) {
  if (!label || !*label || strlen(label) > MI_LABEL) return false;
  for (const unsigned char *at = (const unsigned char *)label; *at;) {
    int more = *at < 0x80 ? 0 : *at >= 0xC2 && *at < 0xE0 ? 1 : *at >= 0xE0 && *at < 0xF0 ? 2 : 3;
    if (more == 3 && (*at < 0xF0 || *at > 0xF4)) return false;
    for (++at; more > 0; --more, ++at)
      if ((*at & 0xC0) != 0x80) return false;
  }
  return true;
}

static bool guest(const unsigned char *records, int rank) {
  return records[(size_t)rank * MI_RECORD + STATE] >= GUEST;
}

static const char *field(const unsigned char *records, int rank, int offset) {
  return (const char *)records + (size_t)rank * MI_RECORD + offset;
}

/* Whether a launcher started more than one process, by its environment. */
static bool launched_with_others(void) {
  static const char *const names[] = {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS",
                                      "PALS_NRANKS"};
  for (size_t i = 0; i < sizeof names / sizeof names[0]; ++i) {
    const char *value = getenv(names[i]);
    if (value && strtol(value, NULL, 10) > 1) return true;
  }
  return false;
}

static int no_python(int size) {
  int world = 0;
  MPI_Comm_size(MPI_COMM_WORLD, &world);
  char own[LIBRARY_ROOM] = "";
  library_name(own);
  if (world == 1 && launched_with_others())
    return mi_fail(MPIML_ERR_MPI_LIBRARY,
                   "expected the MPI library of the launcher, but this process is alone with %s. "
                   "Start it with the mpirun of that library, or build it with the other's mpicc.",
                   own);
  return mi_fail(MPIML_ERR_ATTACH,
                 "expected ranks that run Python among the %d of the communicator, got none. Start "
                 "both in one job: mpirun -n 4 ./solver : -n 2 python -m mpiml.run program.py",
                 size);
}

int mi_records_check(const unsigned char *records, int size, int rank) {
  int python = 0;
  for (int r = 0; r < size; ++r) python += !guest(records, r);
  if (python == 0) return no_python(size);
  for (int r = 0; r < size; ++r)
    if (guest(records, r) && memcmp(field(records, r, VERSION), WRONG, VERSION_ROOM) == 0)
      return mi_fail(MPIML_ERR_ATTACH,
                     "expected all ranks to attach, but rank %d called mpiml_attach with arguments "
                     "that it refuses: its own mpiml_error() says which",
                     r);
  for (int r = 0; r < size; ++r) {
    const char *own = field(records, rank, VERSION), *other = field(records, r, VERSION);
    if (records[(size_t)r * MI_RECORD] != 1 || memcmp(own, other, VERSION_ROOM) != 0)
      return mi_fail(MPIML_ERR_VERSION,
                     "expected mpiml %.*s on all ranks, as this library is, got %.*s on rank %d. "
                     "Build the library from the mpiml that Python imports.",
                     VERSION_ROOM, own, VERSION_ROOM, *other ? other : "an older one", r);
  }
  for (int r = 0; r < size; ++r) {
    const char *own = field(records, rank, LIBRARY), *other = field(records, r, LIBRARY);
    if (memcmp(own, other, LIBRARY_ROOM) != 0)
      return mi_fail(MPIML_ERR_MPI_LIBRARY,
                     "expected the MPI library %.*s on all ranks, as here, got %.*s on rank %d. Build "
                     "the library with the mpicc of the MPI that mpi4py uses.",
                     LIBRARY_ROOM, own, LIBRARY_ROOM, other, r);
  }
  return MPIML_OK;
}

static bool same_label(const unsigned char *records, int a, int b) {
  return strncmp(field(records, a, LABEL), field(records, b, LABEL), MI_LABEL + 1) == 0;
}

/* Number of the label of `rank` among the different ones, in the order of guests. */
static int label_number(const unsigned char *records, int rank) {
  int first = 0, number = 0;
  while (!guest(records, first) || !same_label(records, first, rank)) ++first;
  for (int r = 0; r < first; ++r) {
    if (!guest(records, r)) continue;
    int before = 0;
    while (!guest(records, before) || !same_label(records, before, r)) ++before;
    number += before == r;
  }
  return number;
}

mi_place mi_records_place(const unsigned char *records, int size, int rank) {
  mi_place place = {.label = label_number(records, rank), .root = -1};
  int python = 0;
  for (int r = 0; r < size; ++r) {
    if (!guest(records, r)) {
      ++python;
      if (place.root < 0) place.root = r;
      continue;
    }
    if (r < rank) {
      ++place.guest;
      place.index += same_label(records, r, rank);
    }
    ++place.guests;
  }
  int wanted = (int)((int64_t)place.guest * python / place.guests);
  for (int r = 0; r < size; ++r)
    if (!guest(records, r) && wanted-- == 0) place.keeper = r;
  return place;
}
