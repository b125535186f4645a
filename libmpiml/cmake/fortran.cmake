# The Fortran module, where there is a compiler that hands arrays of any type and rank to C
# (Fortran 2018; gfortran from 9 on). It needs no Fortran of the MPI library itself.
include(CheckLanguage)
check_language(Fortran)
if(CMAKE_Fortran_COMPILER)
  enable_language(Fortran)
  include(CheckIncludeFile)
  check_include_file(ISO_Fortran_binding.h MPIML_HAS_DESCRIPTORS)
endif()

if(NOT CMAKE_Fortran_COMPILER)
  message(STATUS "libmpiml: without the Fortran module, since there is no Fortran compiler")
elseif(NOT MPIML_HAS_DESCRIPTORS)
  message(STATUS "libmpiml: without the Fortran module: ${CMAKE_C_COMPILER} does not find "
    "ISO_Fortran_binding.h of the Fortran compiler. Take both from one vendor (CC, FC).")
else()
  add_library(mpiml_fortran SHARED
    ${CMAKE_CURRENT_LIST_DIR}/../fortran/mpiml.f90 ${CMAKE_CURRENT_LIST_DIR}/../fortran/shim.c)
  add_library(mpiml::fortran ALIAS mpiml_fortran)
  set_target_properties(mpiml_fortran PROPERTIES
    EXPORT_NAME fortran VERSION ${PROJECT_VERSION} SOVERSION 0
    Fortran_MODULE_DIRECTORY ${CMAKE_CURRENT_BINARY_DIR}/modules
    C_STANDARD 11 C_STANDARD_REQUIRED ON C_VISIBILITY_PRESET hidden)
  target_include_directories(mpiml_fortran INTERFACE
    $<BUILD_INTERFACE:${CMAKE_CURRENT_BINARY_DIR}/modules>
    $<INSTALL_INTERFACE:include/mpiml>)
  target_link_libraries(mpiml_fortran PUBLIC mpiml)
  target_compile_options(mpiml_fortran PRIVATE
    $<$<COMPILE_LANG_AND_ID:Fortran,GNU>:-std=f2018;-Wall;-Wextra>
    $<$<COMPILE_LANG_AND_ID:C,GNU,Clang,AppleClang>:-Wall;-Wextra;-Wconversion;-Wpedantic>)
endif()
