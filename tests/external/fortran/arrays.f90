! Arrays of every kind and rank, whole and in sections, to Python and back; and what is refused.
module kinds
  use, intrinsic :: iso_c_binding, only: c_bool
  use, intrinsic :: iso_fortran_env, only: error_unit, int8, int16, int32, int64, real32, real64
  use mpiml
  implicit none
contains
  subroutine need(good, what)
    logical, intent(in) :: good
    character(*), intent(in) :: what
    if (good) return
    write (error_unit, "(4a)") "failed: ", what, ": ", mpiml_error()
    flush (error_unit)
    error stop 3
  end subroutine

  !> An argument as old codes have them: its last length is not known.
  subroutine assumed(x, code)
    real(real64), intent(in) :: x(12, *)
    integer, intent(out) :: code
    call mpiml_publish("up", x, code)
  end subroutine

  !> an array of explicit shape with a negative size has none: legal, and empty
  subroutine push_none(n, version, code)
    integer, intent(in) :: n
    integer(int64), intent(in) :: version
    integer, intent(out) :: code
    real(real32) :: x(n)
    call mpiml_push("params", "b", x, version, code)
  end subroutine

  !> Calls check(number, x), which looks at x and returns it with every element plus 1, into y.
  subroutine send(number, x, y)
    integer(int32), intent(in), target :: number
    type(mpiml_described), intent(in) :: x, y
    integer :: code
    call mpiml_call("checker", "check", [mpiml_array(number), x], [y], code)
    call need(code == MPIML_OK, "a call")
  end subroutine
end module

subroutine body(world) bind(C)
#ifdef MPI_F08
  use mpi_f08, only: mpi_comm, mpi_comm_size, mpi_comm_world
#endif
  use kinds
  use, intrinsic :: iso_c_binding, only: c_int
  implicit none
  integer(c_int), value :: world
  real(real64), target :: s, t, u(6, 4), v(6, 4), w(3, 4), wide(12, 9)
  real(real64), target, save :: big(400, 300), answer(400, 600)
  real(real64), target :: empty(0, 3), nothing(0, 3)
  real(real32), target :: r(5), q(5)
  integer(int8), target :: b(3), c(3)
  integer(int16), target :: h(2), g(2)
  integer(int32), target :: m(4, 3), n(4, 3)
  integer(int64), target :: l(2, 3, 4), k(2, 3, 4)
  complex(real32), target :: z4(2, 2, 2, 2), y4(2, 2, 2, 2)
  complex(real64), target :: z(3, 2), y(3, 2)
  logical(c_bool), target :: f(2), e(2)
  logical, target :: default(2)
  integer(int64) :: version
  integer :: code, i1, i2, i3, i4
  logical :: stopping
#ifdef MPI_F08
  type(mpi_comm) :: solver
  integer :: ranks
#else
  integer :: own
#endif

  call need(mpiml_version() == "0.1.0", "version")
  call mpiml_publish("up", s, code)
  call need(code == MPIML_ERR_NOT_ATTACHED .and. len(mpiml_error()) > 0, "before attach")
#ifdef MPI_F08
  call need(mpi_comm_world%mpi_val == int(world), "the world")
  call mpiml_attach(mpi_comm_world%mpi_val, "solver", solver%mpi_val, code)
  call need(code == MPIML_OK, "attach")
  call mpi_comm_size(solver, ranks)
  call need(ranks == 1, "the solver's own communicator")
#else
  call mpiml_attach(int(world), "solver ", own, code)
  call need(code == MPIML_OK, "attach")
#endif

  ! the element [i1, i2, ...] is i1 + 10*i2 + 100*i3 + 1000*i4, from 1 as here
  u = reshape([((real(i1 + 10 * i2, real64), i1 = 1, 6), i2 = 1, 4)], [6, 4])
  do i4 = 1, 2; do i3 = 1, 2; do i2 = 1, 2; do i1 = 1, 2
    z4(i1, i2, i3, i4) = cmplx(i1 + 10 * i2 + 100 * i3 + 1000 * i4, -1)
  end do; end do; end do; end do
  do i3 = 1, 4; do i2 = 1, 3; do i1 = 1, 2
    l(i1, i2, i3) = i1 + 10 * i2 + 100 * i3
  end do; end do; end do
  do i2 = 1, 3; do i1 = 1, 4
    m(i1, i2) = i1 + 10 * i2
  end do; end do
  do i2 = 1, 2; do i1 = 1, 3
    z(i1, i2) = cmplx(i1 + 10 * i2, -1, real64)
  end do; end do
  do i2 = 1, 300; do i1 = 1, 400
    big(i1, i2) = i1 + 10 * i2
  end do; end do
  s = 1
  r = [1, 2, 3, 4, 5]
  b = [1_int8, 2_int8, 3_int8]
  h = [1_int16, 2_int16]
  f = [.true._c_bool, .false._c_bool]

  call send(0, mpiml_array(s), mpiml_array(t))
  call need(abs(t - 2) < 1e-15, "a scalar")
  call send(1, mpiml_array(r), mpiml_array(q))
  call need(all(abs(q - (r + 1)) < 1e-7), "real32")
  call send(2, mpiml_array(m), mpiml_array(n))
  call need(all(n == m + 1), "int32")
  call send(3, mpiml_array(l), mpiml_array(k))
  call need(all(k == l + 1), "int64, rank 3")
  call send(4, mpiml_array(z4), mpiml_array(y4))
  call need(all(abs(y4 - (z4 + 1)) < 1e-7), "complex of real32, rank 4")
  call send(5, mpiml_array(z), mpiml_array(y))
  call need(all(abs(y - (z + 1)) < 1e-15), "complex of real64")
  call send(6, mpiml_array(u), mpiml_array(v))
  call need(all(abs(v - (u + 1)) < 1e-15), "real64")
  call send(7, mpiml_array(u(1:6:2, :)), mpiml_array(w))
  call need(all(abs(w - (u(1:6:2, :) + 1)) < 1e-15), "a section with steps")
  call send(8, mpiml_array(u(6:1:-1, 2:3)), mpiml_array(v(:, 1:4:3)))
  call need(all(abs(v(:, 1:4:3) - (u(6:1:-1, 2:3) + 1)) < 1e-15), "a section backwards")
  call need(all(abs(v(:, 2:3) - (u(:, 2:3) + 1)) < 1e-15), "what is beside a section")
  call send(9, mpiml_array(empty), mpiml_array(nothing))
  call send(10, mpiml_array(b), mpiml_array(c))
  call need(all(c == b + 1_int8), "int8")
  call send(11, mpiml_array(h), mpiml_array(g))
  call need(all(g == h + 1_int16), "int16")
  call send(12, mpiml_array(f), mpiml_array(e))
  call need(.not. logical(e(1)) .and. logical(e(2)), "logical(c_bool)")
  call send(13, mpiml_array(big), mpiml_array(answer(:, ::2)))
  call need(all(abs(answer(:, ::2) - (big + 1)) < 1e-15), "much, into a section")
  call send(14, mpiml_array(u(2, :)), mpiml_array(wide(5, 1:8:2)))
  call need(all(abs(wide(5, 1:8:2) - (u(2, :) + 1)) < 1e-15), "a row")

  version = -1
  call mpiml_pull("params", "w", v, version, code)
  call need(code == MPIML_OK .and. version == 0, "pull")
  call need(all(abs(v - u) < 1e-15), "what was pulled")
  wide = 0
  wide(12:1:-2, 1:8:2) = u
  call mpiml_push("params", "w", wide(12:1:-2, 1:8:2), version, code)
  call need(code == MPIML_OK, "push of a section")
  wide = 7
  call mpiml_pull("params", "w ", wide(1:12:2, 2:8:2), version, code)
  call need(code == MPIML_OK .and. version == 1, "pull into a section")
  call need(all(abs(wide(1:12:2, 2:8:2) - u / 2) < 1e-15), "the step that was pushed")
  call need(all(abs(wide(2:12:2, :) - 7) < 1e-15), "what is beside that section")
  call mpiml_pull("params", "b", v(:5, 1), version, code)
  call need(code == MPIML_ERR_DTYPE, "pull of another type")
  call mpiml_push("params", "b", q(:4), version, code)
  call need(code == MPIML_ERR_SHAPE .and. len(mpiml_error()) > 0, "push of another shape")
  call push_none(-3, version, code)
  call need(code == MPIML_ERR_SHAPE, "push of an array with a negative size")
  call mpiml_pull("params", "c", q, version, code)
  call need(code == MPIML_ERR_METHOD .and. index(mpiml_error(), "c") > 0, "pull of nothing")

  call mpiml_publish("up", u(1:6:2, 2:4), code)
  call need(code == MPIML_OK, "publish")
  u = -1 ! it was taken
  version = 0
  w = 0
  do while (version == 0)
    call mpiml_newest("down", w, version, code)
    call need(code == MPIML_OK, "newest")
  end do
  do i2 = 1, 4; do i1 = 1, 3
    call need(abs(w(i1, i2) - (i1 + 10 * i2)) < 1e-15, "what Python has published")
  end do; end do

  call mpiml_publish("up", m, code)
  call need(code == MPIML_ERR_DTYPE .and. index(mpiml_error(), "int32") > 0, "another type")
  call mpiml_publish("up", default, code)
  call need(code == MPIML_ERR_DTYPE .and. index(mpiml_error(), "logical(c_bool)") > 0, &
      "a type that is none of NumPy's")
  call assumed(wide, code)
  call need(code == MPIML_ERR_SHAPE .and. index(mpiml_error(), "pass x(1:n)") > 0, "x(12, *)")
  call mpiml_publish("up", s, code)
  call need(code == MPIML_ERR_SHAPE, "another rank")
  call mpiml_publish("nowhere", u, code)
  call need(code == MPIML_ERR_TOPIC .and. index(mpiml_error(), "nowhere") > 0, "no topic")
  call mpiml_call("checker", "guess", mpiml_none(), mpiml_none(), code)
  call need(code == MPIML_ERR_METHOD .and. index(mpiml_error(), "guess") > 0, "no method")
  call mpiml_call("checker", "fail", mpiml_none(), mpiml_none(), code, 30.0_real64)
  call need(code == MPIML_ERR_REMOTE .and. index(mpiml_error(), "on purpose") > 0, "a failure")
  call mpiml_call("checker", "one", mpiml_none(), [mpiml_array(r)], code)
  call need(code == MPIML_ERR_DTYPE, "an answer of another type")
  call mpiml_poll(code)
  call need(code == MPIML_OK, "poll")
  call mpiml_stopping(stopping, code)
  call need(code == MPIML_OK .and. .not. stopping, "stopping")
  call mpiml_call("checker", "done", mpiml_none(), mpiml_none(), code)
  call mpiml_leave(code)
  call need(code == MPIML_OK, "leave")
  call mpiml_poll(code)
  call need(code == MPIML_ERR_LEFT, "after leaving")
end subroutine
