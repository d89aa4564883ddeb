# Most of a compilation is spent on headers that many sources share, so sources
# of one folder are compiled together.

# smp_unity(TARGET SOURCE...): the sources of a library, at most five of one
# folder at a time. What is static or in an anonymous namespace has to be named
# apart. Sources that hold a seeded fault (cmake/faults.cmake) keep to
# themselves: they are compiled a second time.
function(smp_unity target)
  if(NOT SMP_UNITY)
    return()
  endif()
  set_target_properties(${target} PROPERTIES
    UNITY_BUILD ON UNITY_BUILD_MODE GROUP)
  # A class with a member of a type that only its source knows is fine there.
  target_compile_options(${target} PRIVATE -Wno-subobject-linkage)
  foreach(source IN LISTS ARGN)
    cmake_path(RELATIVE_PATH source BASE_DIRECTORY ${PROJECT_SOURCE_DIR}
      OUTPUT_VARIABLE path)
    cmake_path(GET path PARENT_PATH group)
    string(REPLACE "/" "_" group ${group})
    if(path IN_LIST smp_fault_sources)
      set(group ${group}_faults)
    else()
      if(NOT DEFINED count_${group})
        set(count_${group} 0)
      endif()
      math(EXPR part "${count_${group}} / 5")
      math(EXPR count_${group} "${count_${group}} + 1")
      set(group ${group}_${part})
    endif()
    set_property(SOURCE ${source} PROPERTY UNITY_GROUP ${group})
  endforeach()
endfunction()

# smp_unity_tests(RESULT NAME SOURCE...)
#
# Tests name things as they like, so each is put into a namespace of its own:
# NAME_N.cpp first includes, outside of any namespace, whatever the tests
# include, which makes their own includes do nothing. A test that cannot stand
# in a namespace says "alone" in its first line.
function(smp_unity_tests result name)
  set(sources "")
  set(batch "")
  set(number 0)
  foreach(source IN LISTS ARGN)
    file(STRINGS ${source} first LIMIT_COUNT 1)
    if(NOT SMP_UNITY OR first MATCHES "^// ctest:.* alone")
      list(APPEND sources ${source})
      continue()
    endif()
    list(APPEND batch ${source})
    list(LENGTH batch length)
    if(length EQUAL 4)
      smp_unity_test_source(${name}_${number} ${batch})
      list(APPEND sources ${CMAKE_BINARY_DIR}/generated/tests/${name}_${number}.cpp)
      math(EXPR number "${number} + 1")
      set(batch "")
    endif()
  endforeach()
  if(batch)
    smp_unity_test_source(${name}_${number} ${batch})
    list(APPEND sources ${CMAKE_BINARY_DIR}/generated/tests/${name}_${number}.cpp)
  endif()
  set(${result} ${sources} PARENT_SCOPE)
endfunction()

function(smp_unity_test_source name)
  set(output ${CMAKE_BINARY_DIR}/generated/tests/${name}.cpp)
  set(script ${PROJECT_SOURCE_DIR}/cmake/unity_test_source.cmake)
  add_custom_command(OUTPUT ${output}
    COMMAND ${CMAKE_COMMAND} -D ROOT=${PROJECT_SOURCE_DIR} -D OUTPUT=${output}
      "-DSOURCES=${ARGN}" -P ${script}
    DEPENDS ${ARGN} ${script} VERBATIM)
endfunction()
