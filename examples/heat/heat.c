/* The heat equation on the unit square, u_t = u_xx + u_yy, on any number of ranks.
 *
 *   mpirun -n 2 ./heat_c : -n 2 python -m mpiml.run trainer.py
 *
 * The ranks share the rows of the grid and exchange those at their edges. For some time they know
 * the boundary, and send their fields to the trainer; then they ask what it has learned for it. */
#include <math.h>
#include <mpiml.h>
#include <stdio.h>
#include <stdlib.h>

static const double OMEGA = 8 * 3.14159265358979323846; /* of the exact solution, 1/s */
static const double RATIO = 0.2; /* dt / h^2; the scheme is stable up to 0.25 */

/* Two damped waves that cross: a solution of the equation, of any shape. */
static double exact(double x, double y, double t) {
  double k = sqrt(OMEGA / 2);
  double p = cos(0.5) * x + sin(0.5) * y;
  double q = cos(2.2) * x + sin(2.2) * y + 0.6;
  return exp(-k * p) * cos(OMEGA * t - k * p) + 0.6 * exp(-k * q) * cos(OMEGA * t - k * q);
}

/* Whether to go on: no error, and the program is not stopping. */
static int good(int code) {
  if (code == MPIML_OK) return 1;
  if (code != MPIML_STOPPED) {
    fprintf(stderr, "heat: %s\n", mpiml_error());
    MPI_Abort(MPI_COMM_WORLD, 1);
  }
  return 0;
}

/* Whether all ranks go on: each may hear of a stop in another step, and they must end in the same. */
static int all(int going, MPI_Comm comm) {
  MPI_Allreduce(MPI_IN_PLACE, &going, 1, MPI_INT, MPI_MIN, comm);
  return going;
}

static double *doubles(size_t count) {
  double *memory = malloc((count ? count : 1) * sizeof *memory);
  if (memory == NULL) {
    fprintf(stderr, "heat: no memory for %zu numbers; give fewer --cells, or more ranks\n", count);
    MPI_Abort(MPI_COMM_WORLD, 1);
  }
  return memory;
}

int main(int argc, char **argv) {
  MPI_Init(&argc, &argv);
  if (argc > 1) {
    fprintf(stderr, "heat: expected no options, got %s; give it to trainer.py\n", argv[1]);
    MPI_Abort(MPI_COMM_WORLD, 2);
  }
  MPI_Comm comm = MPI_COMM_NULL; /* of the solver's ranks, in place of MPI_COMM_WORLD */
  if (mpiml_attach(MPI_COMM_WORLD, "solver", &comm) != MPIML_OK) { /* then on no rank */
    fprintf(stderr, "heat: %s\n", mpiml_error());
    MPI_Finalize();
    return 1;
  }

  int64_t setting[4] = {1, 0, 0, 1}, four = 4; /* the trainer's command line has them */
  mpiml_array answer = mpiml_array_c(setting, MPIML_INT64, 1, &four);
  int going = good(mpiml_call("surrogate", "settings", 0, NULL, 1, &answer, 0));
  int cells = (int)setting[0], steps = (int)setting[1];
  int learn = (int)setting[2], every = (int)setting[3];

  int rank, size;
  MPI_Comm_rank(comm, &rank);
  MPI_Comm_size(comm, &size);
  int first = cells * rank / size, rows = cells * (rank + 1) / size - first, wide = cells + 2;
  int up = rank > 0 ? rank - 1 : MPI_PROC_NULL;
  int down = rank < size - 1 ? rank + 1 : MPI_PROC_NULL;
  double h = 1.0 / (cells + 1), dt = RATIO * h * h;
  double(*u)[wide] = (void *)doubles((size_t)(rows + 2) * (size_t)wide);
  double(*next)[wide] = (void *)doubles((size_t)(rows + 2) * (size_t)wide);

  /* my rows, with those of the boundary and without those of neighbours: [begin, end) */
  int begin = up == MPI_PROC_NULL ? 0 : 1, end = down == MPI_PROC_NULL ? rows + 2 : rows + 1;
  int64_t shape[2] = {end - begin, wide};
  int edges = 0; /* points of the boundary that are mine */
  int(*edge)[2] = malloc((size_t)(2 * (rows + 2 + wide)) * sizeof *edge);
  for (int i = begin; i < end; ++i)
    for (int j = 0; j < wide; ++j)
      if (j == 0 || j == wide - 1 || first + i == 0 || first + i == cells + 1) {
        edge[edges][0] = i;
        edge[edges++][1] = j;
      }
  int64_t many = (int64_t)every * edges, points[2] = {many, 3};
  double(*ahead)[3] = (void *)doubles((size_t)many * 3); /* points of the next steps: x, y, t */
  double *values = doubles((size_t)many);
  mpiml_array where = mpiml_array_c(ahead, MPIML_FLOAT64, 2, points);
  mpiml_array there = mpiml_array_c(values, MPIML_FLOAT64, 1, &many);

  for (int i = 0; i < rows + 2; ++i)
    for (int j = 0; j < wide; ++j) u[i][j] = exact((first + i) * h, j * h, 0.0);
  for (int step = 1; step <= steps && all(going, comm); ++step) {
    MPI_Sendrecv(u[1], wide, MPI_DOUBLE, up, 0, u[rows + 1], wide, MPI_DOUBLE, down, 0, comm,
                 MPI_STATUS_IGNORE);
    MPI_Sendrecv(u[rows], wide, MPI_DOUBLE, down, 0, u[0], wide, MPI_DOUBLE, up, 0, comm,
                 MPI_STATUS_IGNORE);
    for (int i = 1; i <= rows; ++i)
      for (int j = 1; j <= cells; ++j) {
        double around = (u[i - 1][j] + u[i + 1][j]) + (u[i][j - 1] + u[i][j + 1]);
        next[i][j] = u[i][j] + RATIO * (around - 4 * u[i][j]);
      }
    int which = (step - learn - 1) % every;
    if (step > learn && which == 0) {
      for (int64_t n = 0; n < many; ++n) {
        ahead[n][0] = (first + edge[n % edges][0]) * h;
        ahead[n][1] = edge[n % edges][1] * h;
        ahead[n][2] = (double)(step + n / edges) * dt;
      }
      going = good(mpiml_call("surrogate", "predict", 1, &where, 1, &there, 0));
    }
    for (int e = 0; e < edges; ++e) {
      int i = edge[e][0], j = edge[e][1];
      next[i][j] = step <= learn ? exact((first + i) * h, j * h, step * dt)
                                 : values[which * edges + e];
    }
    double(*old)[wide] = u;
    u = next;
    next = old;
    if (going && step % every == 0) {
      mpiml_array field = mpiml_array_c(u[begin], MPIML_FLOAT64, 2, shape);
      going = good(mpiml_publish("fields", &field)); /* may be changed from here on */
    }
  }

  good(mpiml_leave());
  free(u), free(next), free(edge), free(ahead), free(values);
  MPI_Comm_free(&comm);
  MPI_Finalize();
  return 0;
}
