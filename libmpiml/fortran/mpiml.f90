!> The ranks of a Fortran code as nodes of an mpiml program.
!>
!>     use mpi_f08
!>     use mpiml
!>     call mpi_init()
!>     call mpiml_attach(mpi_comm_world%mpi_val, "solver", own%mpi_val, code)
!>     if (code /= MPIML_OK) then                  ! then on no rank
!>       write (error_unit, "(a)") mpiml_error()
!>       call mpi_finalize()
!>       stop 1
!>     end if
!>     do while (.not. stopping)
!>       ...                                       ! one time step
!>       call mpiml_publish("fields", u(1:n, 1:m), code)
!>       call mpiml_stopping(stopping, code)       ! as seen here: all end in the same step
!>       call mpi_allreduce(MPI_IN_PLACE, stopping, 1, MPI_LOGICAL, MPI_LOR, own)
!>     end do
!>     call mpiml_leave(code)
!>     call mpi_finalize()
!>
!> The functions are those of mpiml.h, where each is described; `code` is what they return there.
!> Communicators are integers, as in `use mpi`; with `use mpi_f08` pass comm%mpi_val.
!>
!> An array may be of any rank from 0 to 8, a section too, and is not copied to be passed: of
!> integer(int8 to int64), real(real32, real64), complex of them, or logical(c_bool). Python sees
!> the same indices, from 0: x(i, j) is x[i - 1, j - 1] there.
module mpiml
  use, intrinsic :: iso_c_binding, only: c_bool, c_char, c_double, c_int, c_int64_t, c_null_char, &
      c_null_ptr, c_ptr, c_size_t, c_f_pointer
  use, intrinsic :: iso_fortran_env, only: int64, real64
  implicit none
  private

  public :: mpiml_attach, mpiml_publish, mpiml_newest, mpiml_call, mpiml_pull, mpiml_push
  public :: mpiml_poll, mpiml_stopping, mpiml_stop, mpiml_leave, mpiml_error, mpiml_version
  public :: mpiml_array, mpiml_none

  integer, parameter, public :: MPIML_OK = 0, MPIML_STOPPED = 1, MPIML_ERR_USAGE = 2, &
      MPIML_ERR_NOT_ATTACHED = 3, MPIML_ERR_LEFT = 4, MPIML_ERR_VERSION = 5, &
      MPIML_ERR_MPI_LIBRARY = 6, MPIML_ERR_ATTACH = 7, MPIML_ERR_TOPIC = 8, &
      MPIML_ERR_SERVICE = 9, MPIML_ERR_METHOD = 10, MPIML_ERR_DTYPE = 11, &
      MPIML_ERR_SHAPE = 12, MPIML_ERR_REMOTE = 13, MPIML_ERR_FAILED = 14, &
      MPIML_ERR_TIMEOUT = 15, MPIML_ERR_MPI = 16, MPIML_ERR_MEMORY = 17

  integer, parameter :: max_dims = 8 ! MPIML_MAX_DIMS

  !> Says where an array stands, for `mpiml_call`, which takes several. Made by `mpiml_array(x)`:
  !> x has to stay where it is until the call returns, so give it the attribute `target`.
  type, bind(C), public :: mpiml_described
    private
    type(c_ptr) :: data = c_null_ptr
    integer(c_int) :: dtype = 0, ndim = 0
    integer(c_int64_t) :: shape(max_dims) = 0, strides(max_dims) = 0
  end type

  interface
    subroutine c_array(x, out) bind(C, name="mpimlf_array")
      import :: mpiml_described
      type(*), intent(in) :: x(..)
      type(mpiml_described), intent(out) :: out
    end subroutine

    integer(c_int) function c_attach(comm, label, own) bind(C, name="mpimlf_attach")
      import :: c_int, c_char
      integer(c_int), value :: comm
      character(kind=c_char), intent(in) :: label(*)
      integer(c_int), intent(inout) :: own
    end function

    integer(c_int) function c_publish(topic, x) bind(C, name="mpiml_publish")
      import :: c_int, c_char, mpiml_described
      character(kind=c_char), intent(in) :: topic(*)
      type(mpiml_described), intent(in) :: x
    end function

    integer(c_int) function c_newest(topic, into, version) bind(C, name="mpiml_newest")
      import :: c_int, c_char, c_int64_t, mpiml_described
      character(kind=c_char), intent(in) :: topic(*)
      type(mpiml_described), intent(in) :: into
      integer(c_int64_t), intent(inout) :: version
    end function

    integer(c_int) function c_call(service, method, nin, in, nout, out, timeout) &
        bind(C, name="mpiml_call")
      import :: c_int, c_char, c_double, mpiml_described
      character(kind=c_char), intent(in) :: service(*), method(*)
      integer(c_int), value :: nin, nout
      type(mpiml_described), intent(in) :: in(*), out(*)
      real(c_double), value :: timeout
    end function

    integer(c_int) function c_pull(server, name, into, version) bind(C, name="mpiml_pull")
      import :: c_int, c_char, c_int64_t, mpiml_described
      character(kind=c_char), intent(in) :: server(*), name(*)
      type(mpiml_described), intent(in) :: into
      integer(c_int64_t), intent(inout) :: version
    end function

    integer(c_int) function c_push(server, name, gradient, version) bind(C, name="mpiml_push")
      import :: c_int, c_char, c_int64_t, mpiml_described
      character(kind=c_char), intent(in) :: server(*), name(*)
      type(mpiml_described), intent(in) :: gradient
      integer(c_int64_t), value :: version
    end function

    integer(c_int) function c_poll() bind(C, name="mpiml_poll")
      import :: c_int
    end function

    integer(c_int) function c_stopping(flag) bind(C, name="mpiml_stopping")
      import :: c_int
      integer(c_int), intent(inout) :: flag
    end function

    integer(c_int) function c_stop() bind(C, name="mpiml_stop")
      import :: c_int
    end function

    integer(c_int) function c_leave() bind(C, name="mpiml_leave")
      import :: c_int
    end function

    type(c_ptr) function c_error() bind(C, name="mpiml_error")
      import :: c_ptr
    end function

    type(c_ptr) function c_version() bind(C, name="mpiml_version")
      import :: c_ptr
    end function

    integer(c_size_t) function c_strlen(text) bind(C, name="strlen")
      import :: c_ptr, c_size_t
      type(c_ptr), value :: text
    end function
  end interface

contains

  !> Makes the calling ranks the nodes `label` of the program. Collective over `comm`.
  !> `own` is their own communicator, to be used in place of the world.
  subroutine mpiml_attach(comm, label, own, code)
    integer, intent(in) :: comm
    character(*), intent(in) :: label
    integer, intent(inout) :: own
    integer, intent(out) :: code
    code = c_attach(comm, text(label), own)
  end subroutine

  !> Publishes an array on a topic. Local; x may be changed when it returns.
  subroutine mpiml_publish(topic, x, code)
    character(*), intent(in) :: topic
    type(*), intent(in), target :: x(..)
    integer, intent(out) :: code
    code = c_publish(text(topic), mpiml_array(x))
  end subroutine

  !> Copies the newest array of a topic into `into`, where it has not been taken yet. Local; no wait.
  !> `version` grows with each array; 0: nothing was published yet.
  subroutine mpiml_newest(topic, into, version, code)
    character(*), intent(in) :: topic
    type(*), intent(inout), target :: into(..)
    integer(int64), intent(inout) :: version
    integer, intent(out) :: code
    code = c_newest(text(topic), mpiml_array(into), version)
  end subroutine

  !> Describes an array of any type and rank.
  function mpiml_array(x) result(described)
    type(*), intent(in), target :: x(..)
    type(mpiml_described) :: described
    call c_array(x, described)
  end function

  !> No arrays, in or out, for `mpiml_call`.
  function mpiml_none() result(empty)
    type(mpiml_described) :: empty(0)
    empty = mpiml_described()
  end function

  !> Calls a method of a service. Local; waits, at most `timeout` seconds where that is given.
  !>
  !>     call mpiml_call("model", "predict", [mpiml_array(x)], [mpiml_array(y)], code)
  !>
  !> Either list may be empty: `mpiml_none()`.
  subroutine mpiml_call(service, method, in, out, code, timeout)
    character(*), intent(in) :: service, method
    type(mpiml_described), intent(in) :: in(:), out(:)
    integer, intent(out) :: code
    real(real64), intent(in), optional :: timeout
    real(c_double) :: seconds
    seconds = 0
    if (present(timeout)) seconds = timeout
    code = c_call(text(service), text(method), size(in), in, size(out), out, seconds)
  end subroutine

  !> Copies parameters of a parameter server into `into`. Local; waits.
  subroutine mpiml_pull(server, name, into, version, code)
    character(*), intent(in) :: server, name
    type(*), intent(inout), target :: into(..)
    integer(int64), intent(inout) :: version
    integer, intent(out) :: code
    code = c_pull(text(server), text(name), mpiml_array(into), version)
  end subroutine

  !> Sends a gradient to a parameter server. Local.
  subroutine mpiml_push(server, name, gradient, version, code)
    character(*), intent(in) :: server, name
    type(*), intent(in), target :: gradient(..)
    integer(int64), intent(in) :: version
    integer, intent(out) :: code
    code = c_push(text(server), text(name), mpiml_array(gradient), version)
  end subroutine

  !> Lets messages move, once. Local; no wait.
  subroutine mpiml_poll(code)
    integer, intent(out) :: code
    code = c_poll()
  end subroutine

  !> Tells whether the program is stopping. Local; no wait.
  subroutine mpiml_stopping(flag, code)
    logical, intent(out) :: flag
    integer, intent(out) :: code
    integer(c_int) :: number
    number = 0
    code = c_stopping(number)
    flag = number /= 0
  end subroutine

  !> Asks all nodes to stop. Local; returns at once.
  subroutine mpiml_stop(code)
    integer, intent(out) :: code
    code = c_stop()
  end subroutine

  !> Returns, as the function of a PyNode does. Once per process, before mpi_finalize.
  subroutine mpiml_leave(code)
    integer, intent(out) :: code
    code = c_leave()
  end subroutine

  !> Text of the last error: where, what was expected, what came, what to do. "": there was none.
  function mpiml_error() result(message)
    character(:), allocatable :: message
    message = from_c(c_error())
  end function

  !> Version of the library.
  function mpiml_version() result(version)
    character(:), allocatable :: version
    version = from_c(c_version())
  end function

  function text(name) result(ended)
    character(*), intent(in) :: name
    character(kind=c_char) :: ended(len_trim(name) + 1)
    integer :: i
    do i = 1, len_trim(name)
      ended(i) = name(i:i)
    end do
    ended(size(ended)) = c_null_char
  end function

  function from_c(pointer) result(copy)
    type(c_ptr), intent(in) :: pointer
    character(:), allocatable :: copy
    character(kind=c_char), pointer :: letters(:)
    integer :: i
    call c_f_pointer(pointer, letters, [c_strlen(pointer)])
    allocate (character(size(letters)) :: copy)
    do i = 1, size(letters)
      copy(i:i) = letters(i)
    end do
  end function
end module
