# Programs to bin, libsmp to lib, headers to include/smp, configurations to
# share/smp, and a package file for find_package(smp).

include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/smp)

install(TARGETS smp smp_user EXPORT smp)
install(EXPORT smp NAMESPACE smp:: FILE smpTargets.cmake
  DESTINATION ${package_dir})

get_property(folders GLOBAL PROPERTY smp_folders)
foreach(folder IN LISTS folders)
  if(NOT folder MATCHES "/" AND EXISTS ${PROJECT_SOURCE_DIR}/${folder})
    install(DIRECTORY ${folder} DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/smp
      FILES_MATCHING PATTERN "*.hpp")
  endif()
endforeach()

if(EXISTS ${PROJECT_SOURCE_DIR}/config)
  install(DIRECTORY config DESTINATION ${CMAKE_INSTALL_DATADIR}/smp)
endif()

configure_package_config_file(cmake/smpConfig.cmake.in
  ${CMAKE_BINARY_DIR}/generated/smpConfig.cmake INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(
  ${CMAKE_BINARY_DIR}/generated/smpConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES
  ${CMAKE_BINARY_DIR}/generated/smpConfig.cmake
  ${CMAKE_BINARY_DIR}/generated/smpConfigVersion.cmake
  cmake/deps.cmake
  DESTINATION ${package_dir})
