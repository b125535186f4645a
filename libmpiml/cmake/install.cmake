# cmake --install: headers, libraries, what find_package(mpiml) and pkg-config read.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)
set(config ${CMAKE_INSTALL_LIBDIR}/cmake/mpiml)

set(targets mpiml)
if(TARGET mpiml_fortran)
  list(APPEND targets mpiml_fortran)
  # A .mod file belongs to its compiler: in a folder of its own, not among the headers.
  install(FILES ${CMAKE_CURRENT_BINARY_DIR}/modules/mpiml.mod
    DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/mpiml)
endif()
# The MPI library may be a wheel's, in a place that no loader searches.
set_target_properties(${targets} PROPERTIES
  INSTALL_RPATH "$ORIGIN" INSTALL_RPATH_USE_LINK_PATH ON)
install(TARGETS ${targets} EXPORT mpiml-targets LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(FILES ${CMAKE_CURRENT_LIST_DIR}/../include/mpiml.h
  DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(EXPORT mpiml-targets NAMESPACE mpiml:: DESTINATION ${config})

# What find_package(mpiml) compares with the MPI library of the project that calls it.
set(mpi_libraries "")
foreach(library IN LISTS MPI_C_LIBRARIES)
  get_filename_component(library "${library}" REALPATH)
  if(library MATCHES "/lib[^/]*mpi[^/]*$")
    list(APPEND mpi_libraries "${library}")
  endif()
endforeach()

configure_package_config_file(${CMAKE_CURRENT_LIST_DIR}/mpiml-config.cmake.in
  ${CMAKE_CURRENT_BINARY_DIR}/mpiml-config.cmake INSTALL_DESTINATION ${config})
write_basic_package_version_file(${CMAKE_CURRENT_BINARY_DIR}/mpiml-config-version.cmake
  COMPATIBILITY SameMinorVersion)  # the library and the Python package go together
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/mpiml-config.cmake
  ${CMAKE_CURRENT_BINARY_DIR}/mpiml-config-version.cmake DESTINATION ${config})

foreach(name IN ITEMS mpiml mpiml-fortran)
  if(name STREQUAL mpiml OR TARGET mpiml_fortran)
    configure_file(${CMAKE_CURRENT_LIST_DIR}/${name}.pc.in ${name}.pc @ONLY)
    install(FILES ${CMAKE_CURRENT_BINARY_DIR}/${name}.pc
      DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
  endif()
endforeach()
