# header_check: every header compiles alone, with just what its folder may see.

add_custom_target(header_check)

function(smp_check_headers folder)
  smp_wanted(wanted ${folder})
  if(NOT wanted)
    return()
  endif()
  smp_folder_target(name ${folder})
  get_property(exclude GLOBAL PROPERTY ${name}_exclude)
  file(GLOB_RECURSE headers CONFIGURE_DEPENDS
    RELATIVE ${PROJECT_SOURCE_DIR} ${PROJECT_SOURCE_DIR}/${folder}/*.hpp)
  foreach(other IN LISTS exclude)
    list(FILTER headers EXCLUDE REGEX "^${other}/")
  endforeach()
  if(NOT headers)
    return()
  endif()
  set(sources "")
  foreach(header IN LISTS headers)
    set(source ${CMAKE_BINARY_DIR}/header_check/${header}.cpp)
    # Twice, so that a missing #pragma once shows too.
    file(CONFIGURE OUTPUT ${source} @ONLY
      CONTENT "#include \"@header@\"\n#include \"@header@\"\n")
    list(APPEND sources ${source})
  endforeach()
  add_library(${name}_header_check OBJECT EXCLUDE_FROM_ALL ${sources})
  target_link_libraries(${name}_header_check PRIVATE ${name}_headers)
  target_compile_options(${name}_header_check PRIVATE -O0)
  add_dependencies(header_check ${name}_header_check)
endfunction()

get_property(folders GLOBAL PROPERTY smp_folders)
foreach(folder IN LISTS folders)
  smp_check_headers(${folder})
endforeach()
