/* mpiml.h: the ranks of a C, C++ or Fortran code as nodes of an mpiml program.
 *
 *     #include <mpiml.h>
 *
 *     MPI_Init(&argc, &argv);
 *     MPI_Comm solver;                                 // use it where you used MPI_COMM_WORLD
 *     if (mpiml_attach(MPI_COMM_WORLD, "solver", &solver) != MPIML_OK) {
 *       fprintf(stderr, "%s\n", mpiml_error());       // attached is no rank, or each
 *       MPI_Finalize();
 *       return 1;
 *     }
 *     int64_t shape[2] = {rows, columns};
 *     mpiml_array u = mpiml_array_c(field, MPIML_FLOAT64, 2, shape);
 *     for (int stop = 0; !stop && step < steps; ++step) {
 *       ...                                            // one time step
 *       mpiml_publish("fields", &u);                   // returns at once; field may change
 *       mpiml_stopping(&stop);                         // as seen here: all end in the same step
 *       MPI_Allreduce(MPI_IN_PLACE, &stop, 1, MPI_INT, MPI_MAX, solver);
 *     }
 *     mpiml_leave();
 *     MPI_Comm_free(&solver);
 *     MPI_Finalize();
 *
 * Started as `mpirun -n 4 ./solver : -n 2 python -m mpiml.run trainer.py`, where trainer.py
 * has `program.add_node(mpiml.ExternalNode(...), label="solver", replicas=4)`.
 *
 * Rules
 * - Every function returns an mpiml_code; mpiml_error() has the text. Nothing is printed,
 *   nothing aborts, but an attach without memory for the table of the program. Outputs are
 *   untouched unless the call returned MPIML_OK, where its description does not say otherwise.
 * - MPI is called only by the thread that calls mpiml_*, and only during that call; there
 *   is no thread of the library's own. MPI_THREAD_SINGLE or FUNNELED is enough. Two
 *   threads must not be inside mpiml_* at the same time.
 * - Messages move only inside mpiml_* calls. A loop that calls none of them for long should
 *   call mpiml_poll() now and then: others wait for it.
 * - Every wait ends: with what it waits for, when the program stops (MPIML_STOPPED), when it
 *   fails (MPIML_ERR_FAILED), or at its timeout (MPIML_ERR_TIMEOUT).
 * - What is under way cannot be called back. A wait that ends early goes on for up to 2 s for it,
 *   after a failure up to 10 s. If MPI has some memory of the caller even then, arguments or
 *   results, the text says so: it must stay as it is until mpiml_leave.
 * - Text is UTF-8 and ends with a zero byte. Names: what the Python program calls them.
 */
#ifndef MPIML_H
#define MPIML_H

#include <mpi.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define MPIML_VERSION "0.1.0" /* of this header; equal to that of the Python package */
#define MPIML_MAX_DIMS 8

#if defined(_WIN32)
#define MPIML_API
#else
#define MPIML_API __attribute__((visibility("default")))
#endif

/* What a function returns. */
typedef enum mpiml_code {
  MPIML_OK = 0,
  MPIML_STOPPED = 1,          /* the program is stopping: end your loop and leave */
  MPIML_ERR_USAGE = 2,        /* an argument that can never be right, or a second attach */
  MPIML_ERR_NOT_ATTACHED = 3, /* before mpiml_attach */
  MPIML_ERR_LEFT = 4,         /* after mpiml_leave */
  MPIML_ERR_VERSION = 5,      /* library and Python package are of different versions */
  MPIML_ERR_MPI_LIBRARY = 6,  /* library and mpi4py run with different MPI libraries */
  MPIML_ERR_ATTACH = 7,       /* no Python ranks, or the program has no such external node */
  MPIML_ERR_TOPIC = 8,        /* no such topic, or this node is not its publisher/subscriber */
  MPIML_ERR_SERVICE = 9,      /* no such service or parameter server, or not given to this node */
  MPIML_ERR_METHOD = 10,      /* no such public method, or no such array in the tree of a server */
  MPIML_ERR_DTYPE = 11,       /* an array of another dtype than expected; never converted */
  MPIML_ERR_SHAPE = 12,       /* an array of another shape, or another number of arrays */
  MPIML_ERR_REMOTE = 13,      /* the method raised an exception: its text is in mpiml_error() */
  MPIML_ERR_FAILED = 14,      /* the program has failed elsewhere: its reason is in the text */
  MPIML_ERR_TIMEOUT = 15,     /* no answer in time */
  MPIML_ERR_MPI = 16,         /* an MPI call failed: its text is in mpiml_error() */
  MPIML_ERR_MEMORY = 17       /* no memory */
} mpiml_code;

/* Types of elements, as in NumPy: booleans are one byte, complex numbers are (real, imaginary). */
typedef enum mpiml_dtype {
  MPIML_BOOL = 1,
  MPIML_INT8 = 2,
  MPIML_INT16 = 3,
  MPIML_INT32 = 4,
  MPIML_INT64 = 5,
  MPIML_UINT8 = 6,
  MPIML_UINT16 = 7,
  MPIML_UINT32 = 8,
  MPIML_UINT64 = 9,
  MPIML_FLOAT16 = 10,
  MPIML_FLOAT32 = 11,
  MPIML_FLOAT64 = 12,
  MPIML_COMPLEX64 = 13,
  MPIML_COMPLEX128 = 14
} mpiml_dtype;

/* An array in the caller's memory. The element [i0, i1, ...] stands
 * i0*strides[0] + i1*strides[1] + ... bytes after `data`. Strides may be negative, and need
 * not be multiples of the element's size. All strides 0 means rows in order (C order). An
 * array that is written to must not have two elements in one place. */
typedef struct mpiml_array {
  void *data;                      /* element [0, 0, ...]; may be NULL if there is no element */
  int dtype;                       /* mpiml_dtype */
  int ndim;                        /* 0 (one element) to MPIML_MAX_DIMS */
  int64_t shape[MPIML_MAX_DIMS];   /* numbers of elements; 0 is allowed */
  int64_t strides[MPIML_MAX_DIMS]; /* in bytes */
} mpiml_array;

/* mpiml_array_c: describes an array in row order (C): the last index runs fastest. Local.
 * shape: `ndim` lengths; may be NULL if ndim is 0. A wrong dtype or ndim is reported by the
 * function that the array is given to. */
MPIML_API mpiml_array mpiml_array_c(const void *data, int dtype, int ndim, const int64_t *shape);

/* mpiml_array_f: describes an array in column order (Fortran): the first index runs fastest.
 * Local. Python sees the same indices: x(i, j) is x[i - 1, j - 1]. */
MPIML_API mpiml_array mpiml_array_f(const void *data, int dtype, int ndim, const int64_t *shape);

/* mpiml_attach: makes the calling ranks the nodes `label` of the program. Collective over
 * `comm`, which holds these ranks and those that run Python; with MPMD, MPI_COMM_WORLD.
 *
 * comm   used during this call only; the library works on duplicates of its own.
 * label  of an ExternalNode in the program. It has as many replicas as ranks attach with
 *        this label; the lowest rank in comm is number 0.
 * own    receives a communicator of these ranks, in the order of their numbers: use it
 *        instead of MPI_COMM_WORLD, and free it when you like.
 *
 * Once per process, after MPI_Init. Returns MPIML_ERR_ATTACH if no rank runs Python or the
 * program has no external node of this label and size, MPIML_ERR_VERSION, and
 * MPIML_ERR_MPI_LIBRARY; then nothing is attached, on any rank. A wrong label, or NULL for `own`,
 * is MPIML_ERR_USAGE on that rank and MPIML_ERR_ATTACH on the others. */
MPIML_API int mpiml_attach(MPI_Comm comm, const char *label, MPI_Comm *own);

/* mpiml_publish: publishes `x` on `topic`. Local.
 *
 * x is copied, or sent, before the function returns: its memory may be changed then. On a
 * topic with policy "latest" the function never waits, a newer array replaces one that could
 * not leave yet; with Keep(n) it waits where a subscriber is n arrays behind.
 * Returns MPIML_ERR_TOPIC if the topic is unknown or this node is not its publisher. */
MPIML_API int mpiml_publish(const char *topic, const mpiml_array *x);

/* mpiml_newest: copies the newest array of `topic` into the caller's memory. Local; no wait.
 *
 * into     dtype and shape must be what was published; the order may differ.
 * version  receives the version of the newest array, which grows with each that is published;
 *          0: nothing was published yet. `into` is written to only if the version has grown
 *          since the last call for this topic.
 *
 * Large arrays are received straight into the caller's memory. So a publisher that is faster
 * than the caller is heard with one call's delay: what it has published since the last call
 * is still on its side. Older arrays are skipped, on topics with Keep(n) too.
 * Returns MPIML_ERR_DTYPE or MPIML_ERR_SHAPE, with both in the text, if `into` does not fit:
 * then the array is there for another try. */
MPIML_API int mpiml_newest(const char *topic, mpiml_array *into, int64_t *version);

/* mpiml_call: calls `method` of `service` with arrays and receives arrays. Local; waits.
 *
 * service, method  a service that was given to the ExternalNode, and one of its public methods.
 * nin, in          its positional arguments, in order; NumPy arrays there, 0-d ones too.
 * nout, out        memory for what it returns: nothing (None) for 0, an array or number for 1,
 *                  a tuple of them for more. Arrays in either order are received in place.
 * timeout          in seconds; 0 or less: no limit of its own.
 *
 * service is a label, or "label/2" for one of several replicas. Arguments are sent from the
 * caller's memory, and answers received into it: see the rules above for calls that end early;
 * all of `out` is then undefined. Returns MPIML_ERR_REMOTE if the method raised, MPIML_ERR_DTYPE or MPIML_ERR_SHAPE if
 * what it returned does not fit (all of `out` is then undefined). */
MPIML_API int mpiml_call(const char *service, const char *method, int nin, const mpiml_array *in,
                         int nout, mpiml_array *out, double timeout);

/* mpiml_pull: copies the newest parameters `name` of a parameter server. Local; waits.
 *
 * server   a ParameterServerNode that was given to the ExternalNode.
 * name     the path of one array in its tree, as in "layers/0/w"; "" if it holds one array.
 * into     receives it, as in mpiml_newest.
 * version  receives the number of updates that the parameters have had. */
MPIML_API int mpiml_pull(const char *server, const char *name, mpiml_array *into,
                         int64_t *version);

/* mpiml_push: sends a gradient for the parameters `name` to a parameter server. Local; waits
 * until the server has taken it, or has dropped it as too old.
 *
 * version  of the parameters it was computed with, as mpiml_pull told. */
MPIML_API int mpiml_push(const char *server, const char *name, const mpiml_array *gradient,
                         int64_t version);

/* mpiml_poll: lets messages move, once. Local; no wait. */
MPIML_API int mpiml_poll(void);

/* mpiml_stopping: sets *flag to 1 if the program is stopping, to 0 if not. Local; no wait.
 * It is no error to ask: MPIML_OK in both cases, MPIML_ERR_FAILED (and 1) if it has failed.
 *
 * Ranks see a stop at different times. Those that exchange data with each other must agree before
 * they end their loop, or some wait for one that has left it:
 *     MPI_Allreduce(MPI_IN_PLACE, &stop, 1, MPI_INT, MPI_MAX, own); */
MPIML_API int mpiml_stopping(int *flag);

/* mpiml_stop: asks all nodes to stop. Local; returns at once. What follows is MPIML_STOPPED
 * as soon as the program has agreed; the caller still has to leave. */
MPIML_API int mpiml_stop(void);

/* mpiml_leave: the node returns, like the function of a PyNode. Local; waits until what was
 * published has been sent. The program may go on without this rank.
 *
 * Once per process. A code that does not call it leaves in MPI_Finalize. Afterwards all
 * functions but mpiml_error and mpiml_version return MPIML_ERR_LEFT. Returns
 * MPIML_ERR_FAILED, with the reason, if the program has failed. */
MPIML_API int mpiml_leave(void);

/* mpiml_error: text of the last error of the calling thread: where, what was expected, what
 * came, on which rank, what to do. "" if there was none. Local; valid until the next error
 * in this thread. May be called at any time. */
MPIML_API const char *mpiml_error(void);

/* mpiml_version: version of the library, as in "0.1.0". Local. May be called at any time. */
MPIML_API const char *mpiml_version(void);

#ifdef __cplusplus
}
#endif

#endif /* MPIML_H */
