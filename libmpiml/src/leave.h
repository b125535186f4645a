/* leave.h: how a guest leaves. */
#ifndef MPIML_LEAVE_H
#define MPIML_LEAVE_H

/* A Python rank has said that it sends nothing more. */
void mi_on_gone(int rank);

/* Lets go of what is known of the program. */
void mi_forget(void);

/* Leaves in MPI_Finalize, if the code does not before. */
int mi_leave_at_the_end(void);

#endif
