# Programs to bin, libsmp to lib, headers to include/smp, configurations to
# share/smp, and a package file for find_package(smp).

include(CMakePackageConfigHelpers)

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/smp)

install(TARGETS smp smp_user EXPORT smp)
install(EXPORT smp NAMESPACE smp:: FILE smpTargets.cmake
  DESTINATION ${package_dir})

# What users include, and what that includes in turn; no other header.
install(DIRECTORY include/smp DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}
  FILES_MATCHING PATTERN "*.hpp")

function(smp_included result file)
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${file})
  file(STRINGS ${PROJECT_SOURCE_DIR}/${file} lines REGEX "^#include \"")
  foreach(line IN LISTS lines)
    string(REGEX REPLACE "^#include \"([^\"]*)\".*" "\\1" header "${line}")
    if(NOT header IN_LIST ${result} AND EXISTS ${PROJECT_SOURCE_DIR}/${header})
      list(APPEND ${result} ${header})
      smp_included(${result} ${header})
    endif()
  endforeach()
  set(${result} ${${result}} PARENT_SCOPE)
endfunction()

set(headers "")
file(GLOB public RELATIVE ${PROJECT_SOURCE_DIR} CONFIGURE_DEPENDS include/smp/*.hpp)
foreach(header IN LISTS public)
  smp_included(headers ${header})
endforeach()
foreach(header IN LISTS headers)
  cmake_path(GET header PARENT_PATH folder)
  install(FILES ${header}
    DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/smp/detail/${folder})
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
