# header_check: every header compiles alone, with just what its folder may see,
# and twice, so that a missing #pragma once shows too. Only the syntax is
# checked, nothing is compiled.
#
# Headers that may include Torch get the precompiled one: a check takes a
# second instead of fifteen and still finds that an include of ours is missing.
# That one of Torch's is missing must not happen to what users include.

set(smp_headers_for_users include/smp/smp.hpp include/smp/plugin.hpp)

# smp_check_headers(FOLDER RESULT): appends to RESULT what says that a header
# passed.
function(smp_check_headers folder result)
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
  # What the compiler is told, one argument a line.
  set(flags ${CMAKE_BINARY_DIR}/header_check/${name}.flags)
  set(interface "$<TARGET_PROPERTY:${name}_headers,INTERFACE_")
  string(TOUPPER "${CMAKE_BUILD_TYPE}" type)
  separate_arguments(common NATIVE_COMMAND
    "${CMAKE_CXX_FLAGS} ${CMAKE_CXX_FLAGS_${type}} ${CMAKE_CXX20_STANDARD_COMPILE_OPTION}")
  get_directory_property(options COMPILE_OPTIONS)
  set(includes "$<REMOVE_DUPLICATES:$<FILTER:${interface}INCLUDE_DIRECTORIES>,EXCLUDE,^(${PROJECT_SOURCE_DIR}|/usr/include)$>>")
  set(definitions "${interface}COMPILE_DEFINITIONS>")
  file(GENERATE OUTPUT ${flags} CONTENT
    "$<JOIN:${common};${options};-I${PROJECT_SOURCE_DIR},\n>
$<$<BOOL:${includes}>:-isystem$<JOIN:${includes},\n-isystem>\n>$<$<BOOL:${definitions}>:-D$<JOIN:${definitions},\n-D>\n>")
  get_target_property(libraries ${name}_headers INTERFACE_LINK_LIBRARIES)
  foreach(header IN LISTS headers)
    set(passed ${CMAKE_BINARY_DIR}/header_check/${header}.passed)
    set(pch "")
    if(TARGET smp_torch_pch AND "smp::torch" IN_LIST libraries
        AND NOT header IN_LIST smp_headers_for_users)
      set(pch ${CMAKE_BINARY_DIR}/CMakeFiles/smp_torch_pch.dir/cmake_pch.hxx)
    endif()
    add_custom_command(OUTPUT ${passed}
      COMMAND ${CMAKE_COMMAND} -D COMPILER=${CMAKE_CXX_COMPILER}
        -D FLAGS=${flags} -D HEADER=${header} -D PCH=${pch} -D PASSED=${passed}
        -P ${PROJECT_SOURCE_DIR}/cmake/check_header.cmake
      DEPENDS ${header} ${flags} cmake/check_header.cmake "$<$<BOOL:${pch}>:${pch}.gch>"
      DEPFILE ${passed}.d COMMENT "Checking ${header}" VERBATIM)
    list(APPEND ${result} ${passed})
  endforeach()
  set(${result} ${${result}} PARENT_SCOPE)
endfunction()

set(all_passed "")
get_property(folders GLOBAL PROPERTY smp_folders)
foreach(folder IN LISTS folders)
  smp_check_headers(${folder} all_passed)
endforeach()
add_custom_target(header_check DEPENDS ${all_passed})
