/* leave.h: how a guest leaves. */
#ifndef MPIML_LEAVE_H
#define MPIML_LEAVE_H

/* A Python rank has said that it sends nothing more. */
void mi_on_gone(int rank);

/* Leaves in MPI_Finalize, if the code does not before. */
int mi_leave_at_the_end(void);

#endif
