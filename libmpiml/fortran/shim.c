/* What the Fortran module calls: descriptors of arrays and handles of MPI become C's.
 *
 * A Fortran compiler hands any array, of any type and rank, sections too, as a descriptor
 * (ISO_Fortran_binding.h, Fortran 2018, 18.5): address, type, lengths, and strides in bytes. So
 * nothing is copied here, and no interface is needed for each type and rank. */
#include <ISO_Fortran_binding.h>
#include <mpiml.h>
#include <stdbool.h>

/* as in src/array.h */
#define MI_OF_FORTRAN (-1)
#define MI_ASSUMED INT64_MIN

#define EXPORT __attribute__((visibility("default")))

static int dtype_of(const CFI_cdesc_t *x) {
  const struct {
    CFI_type_t type;
    size_t bytes;
    int dtype;
  } known[] = {
      {CFI_type_double, 8, MPIML_FLOAT64},
      {CFI_type_float, 4, MPIML_FLOAT32},
      {CFI_type_int32_t, 4, MPIML_INT32},
      {CFI_type_int64_t, 8, MPIML_INT64},
      {CFI_type_int16_t, 2, MPIML_INT16},
      {CFI_type_int8_t, 1, MPIML_INT8},
      {CFI_type_double_Complex, 16, MPIML_COMPLEX128},
      {CFI_type_float_Complex, 8, MPIML_COMPLEX64},
      {CFI_type_Bool, 1, MPIML_BOOL},
  };
  for (size_t i = 0; i < sizeof known / sizeof *known; ++i)
    if (x->type == known[i].type && x->elem_len == known[i].bytes) return known[i].dtype;
  return MI_OF_FORTRAN; /* reported by the function that gets the array */
}

EXPORT void mpimlf_array(CFI_cdesc_t *x, mpiml_array *out);
EXPORT void mpimlf_array(CFI_cdesc_t *x, mpiml_array *out) {
  *out = (mpiml_array){.data = x->base_addr, .dtype = dtype_of(x), .ndim = x->rank};
  for (int i = 0; i < x->rank && i < MPIML_MAX_DIMS; ++i) {
    /* -1 in the last dimension: assumed size. gfortran writes others for empty arrays, a(n), n < 0 */
    bool assumed = x->dim[i].extent == -1 && i == x->rank - 1;
    int64_t extent = x->dim[i].extent > 0 ? (int64_t)x->dim[i].extent : 0;
    out->shape[i] = assumed ? MI_ASSUMED : extent;
    out->strides[i] = (int64_t)x->dim[i].sm;
  }
}

EXPORT int mpimlf_attach(MPI_Fint comm, const char *label, MPI_Fint *own);
EXPORT int mpimlf_attach(MPI_Fint comm, const char *label, MPI_Fint *own) {
  MPI_Comm made = MPI_COMM_NULL;
  int code = mpiml_attach(MPI_Comm_f2c(comm), label, &made);
  if (code == MPIML_OK) *own = MPI_Comm_c2f(made);
  return code;
}
