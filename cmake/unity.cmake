# Most of a compilation is spent on headers that many sources share, so sources
# of one folder are compiled together.

# smp_uses_torch(RESULT FILE): whether FILE, or a header of ours that it includes,
# wants more of Torch than tensors. Such a file takes twenty seconds without the
# precompiled torch/torch.h. With it every file takes six, for what Torch's
# inline functions instantiate, so that others are faster without.
function(smp_uses_torch result file)
  get_property(known GLOBAL PROPERTY smp_uses_torch_${file})
  if("${known}" STREQUAL "")
    set(known FALSE)
    set_property(GLOBAL PROPERTY smp_uses_torch_${file} ${known}) # for circles
    file(STRINGS ${PROJECT_SOURCE_DIR}/${file} lines REGEX "^#include")
    foreach(line IN LISTS lines)
      if(line MATCHES "<torch/|<ATen/ATen[.]h>")
        set(known TRUE)
        break()
      elseif(line MATCHES "\"(.*[.]hpp)\"")
        set(header ${CMAKE_MATCH_1})
        if(EXISTS ${PROJECT_SOURCE_DIR}/${header})
          smp_uses_torch(known ${header})
        endif()
        if(known)
          break()
        endif()
      endif()
    endforeach()
    set_property(GLOBAL PROPERTY smp_uses_torch_${file} ${known})
  endif()
  set(${result} ${known} PARENT_SCOPE)
endfunction()

# smp_split(WITH WITHOUT SOURCE...): the sources of folders that use Torch, and
# the others.
function(smp_split with without)
  set(paths ${ARGN})
  list(TRANSFORM paths REPLACE "^${PROJECT_SOURCE_DIR}/" "")
  set(heavy "")
  foreach(path IN LISTS paths)
    smp_uses_torch(uses ${path})
    if(uses)
      cmake_path(GET path PARENT_PATH folder)
      list(APPEND heavy ${PROJECT_SOURCE_DIR}/${folder})
    endif()
  endforeach()
  set(lists_TRUE "")
  set(lists_FALSE "")
  foreach(source IN LISTS ARGN)
    cmake_path(GET source PARENT_PATH folder)
    if(folder IN_LIST heavy)
      list(APPEND lists_TRUE ${source})
    else()
      list(APPEND lists_FALSE ${source})
    endif()
  endforeach()
  set(${with} ${lists_TRUE} PARENT_SCOPE)
  set(${without} ${lists_FALSE} PARENT_SCOPE)
endfunction()

# smp_unity(TARGET SOURCE...): the sources of a library, at most eight of one
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
  target_compile_options(${target} PRIVATE
    $<$<CXX_COMPILER_ID:GNU>:-Wno-subobject-linkage>)
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
      math(EXPR part "${count_${group}} / 8")
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
