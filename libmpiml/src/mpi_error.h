/* mpi_error.h: what is said of an MPI call that failed. */
#ifndef MPIML_MPI_ERROR_H
#define MPIML_MPI_ERROR_H

/* Sets the text, and returns MPIML_ERR_MPI; MPIML_OK for MPI_SUCCESS. */
int mi_mpi(const char *call, int error);

#endif
