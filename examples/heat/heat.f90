! The heat equation on the unit square, u_t = u_xx + u_yy, on any number of ranks: heat.c in Fortran.
!
!   mpirun -n 2 ./heat_f : -n 2 python -m mpiml.run trainer.py
program heat
  use, intrinsic :: iso_fortran_env, only: error_unit, int64, real64
  use mpi
  use mpiml
  implicit none
  real(real64), parameter :: omega = 8 * 3.14159265358979323846_real64, ratio = 0.2_real64
  real(real64), allocatable :: u(:, :), next(:, :)
  real(real64), allocatable, target :: ahead(:, :), values(:)
  integer, allocatable :: edge(:, :) ! points of the boundary that are mine: (2, edges)
  integer(int64), target :: setting(4)
  integer :: comm, code, rank, ranks, up, down, cells, steps, learn, every, first, rows, last
  integer :: i, j, n, begin, edges, step, which
  real(real64) :: h, dt
  logical :: going

  call mpi_init(code)
  if (command_argument_count() > 0) then
    write (error_unit, "(a)") "heat: expected no options, got some; give them to trainer.py"
    call mpi_abort(MPI_COMM_WORLD, 2, code)
  end if
  call mpiml_attach(MPI_COMM_WORLD, "solver", comm, code) ! comm takes the place of the world
  if (code /= MPIML_OK) then ! then on no rank
    write (error_unit, "(2a)") "heat: ", mpiml_error()
    call mpi_finalize(code)
    stop 1
  end if
  setting = [1, 0, 0, 1] ! cells, steps, learn, every: the trainer's command line has them
  call mpiml_call("surrogate", "settings", mpiml_none(), [mpiml_array(setting)], code)
  going = good(code)
  cells = int(setting(1)); steps = int(setting(2)); learn = int(setting(3)); every = int(setting(4))

  call mpi_comm_rank(comm, rank, code)
  call mpi_comm_size(comm, ranks, code)
  first = cells * rank / ranks
  rows = cells * (rank + 1) / ranks - first
  last = cells + 1
  up = merge(rank - 1, MPI_PROC_NULL, rank > 0)
  down = merge(rank + 1, MPI_PROC_NULL, rank < ranks - 1)
  h = 1.0_real64 / (cells + 1)
  dt = ratio * h * h
  allocate (u(0:rows + 1, 0:last), next(0:rows + 1, 0:last))

  ! my rows, with those of the boundary and without those of neighbours: begin to n
  begin = merge(0, 1, up == MPI_PROC_NULL)
  n = merge(rows + 1, rows, down == MPI_PROC_NULL)
  allocate (edge(2, 2 * (rows + 2 + cells + 2)))
  edges = 0
  do i = begin, n
    do j = 0, last
      if (j == 0 .or. j == last .or. first + i == 0 .or. first + i == last) then
        edges = edges + 1
        edge(:, edges) = [i, j]
      end if
    end do
  end do
  allocate (ahead(every * edges, 3), values(every * edges)) ! points of the next steps: x, y, t

  do j = 0, last
    do i = 0, rows + 1
      u(i, j) = exact((first + i) * h, j * h, 0.0_real64)
    end do
  end do
  do step = 1, steps
    ! each rank may hear of a stop in another step, and they must end in the same
    call mpi_allreduce(MPI_IN_PLACE, going, 1, MPI_LOGICAL, MPI_LAND, comm, code)
    if (.not. going) exit
    ! a row is no contiguous memory here; the compiler makes copies
    call mpi_sendrecv(u(1, :), last + 1, MPI_DOUBLE_PRECISION, up, 0, u(rows + 1, :), last + 1, &
        MPI_DOUBLE_PRECISION, down, 0, comm, MPI_STATUS_IGNORE, code)
    call mpi_sendrecv(u(rows, :), last + 1, MPI_DOUBLE_PRECISION, down, 0, u(0, :), last + 1, &
        MPI_DOUBLE_PRECISION, up, 0, comm, MPI_STATUS_IGNORE, code)
    do j = 1, cells
      do i = 1, rows
        next(i, j) = u(i, j) + ratio * (((u(i - 1, j) + u(i + 1, j)) &
            + (u(i, j - 1) + u(i, j + 1))) - 4 * u(i, j))
      end do
    end do
    which = mod(step - learn - 1, every)
    if (step > learn .and. which == 0) then
      do i = 0, every * edges - 1
        ahead(i + 1, 1) = (first + edge(1, mod(i, edges) + 1)) * h
        ahead(i + 1, 2) = edge(2, mod(i, edges) + 1) * h
        ahead(i + 1, 3) = (step + i / edges) * dt
      end do
      call mpiml_call("surrogate", "predict", [mpiml_array(ahead)], [mpiml_array(values)], code)
      going = good(code)
    end if
    do i = 1, edges
      if (step <= learn) then
        next(edge(1, i), edge(2, i)) = exact((first + edge(1, i)) * h, edge(2, i) * h, step * dt)
      else
        next(edge(1, i), edge(2, i)) = values(which * edges + i)
      end if
    end do
    u = next
    if (going .and. mod(step, every) == 0) then
      call mpiml_publish("fields", u(begin:n, :), code) ! a section; may be changed from here on
      going = good(code)
    end if
  end do

  call mpiml_leave(code)
  going = good(code)
  call mpi_comm_free(comm, code)
  call mpi_finalize(code)

contains

  !> Two damped waves that cross: a solution of the equation, of any shape.
  pure real(real64) function exact(x, y, t)
    real(real64), intent(in) :: x, y, t
    real(real64) :: k, p, q
    k = sqrt(omega / 2)
    p = cos(0.5_real64) * x + sin(0.5_real64) * y
    q = cos(2.2_real64) * x + sin(2.2_real64) * y + 0.6_real64
    exact = exp(-k * p) * cos(omega * t - k * p) + 0.6_real64 * exp(-k * q) * cos(omega * t - k * q)
  end function

  !> Whether to go on: no error, and the program is not stopping.
  logical function good(code)
    integer, intent(in) :: code
    integer :: ignored
    good = code == MPIML_OK
    if (good .or. code == MPIML_STOPPED) return
    write (error_unit, "(2a)") "heat: ", mpiml_error()
    call mpi_abort(MPI_COMM_WORLD, 1, ignored)
  end function
end program
