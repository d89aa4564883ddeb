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

# smp_batches(RESULT SOURCE...): the sources in lists of at most sixteen of one
# folder, as "first;second" items separated by "|". Sixteen take hardly longer
# than four: most of the time goes to templates that all of them instantiate.
function(smp_batches result)
  set(folders "")
  foreach(source IN LISTS ARGN)
    cmake_path(GET source PARENT_PATH folder)
    string(MAKE_C_IDENTIFIER ${folder} id)
    list(APPEND folders ${id})
    list(APPEND sources_${id} ${source})
  endforeach()
  list(REMOVE_DUPLICATES folders)
  set(batches "")
  foreach(id IN LISTS folders)
    list(LENGTH sources_${id} length)
    math(EXPR parts "(${length} + 15) / 16")
    foreach(part RANGE 1 ${parts})
      math(EXPR begin "${length} * (${part} - 1) / ${parts}")
      math(EXPR count "${length} * ${part} / ${parts} - ${begin}")
      list(SUBLIST sources_${id} ${begin} ${count} batch)
      list(JOIN batch "|" batch)
      list(APPEND batches ${batch})
    endforeach()
  endforeach()
  set(${result} ${batches} PARENT_SCOPE)
endfunction()

# smp_unity(RESULT NAME SOURCE...): what to compile for the sources of a library
# or program. What is static or in an anonymous namespace has to be named apart
# within a folder.
#
# Not CMake's UNITY_BUILD: its files name sources by absolute paths, so that no
# clone would find in ccache what another one has compiled.
function(smp_unity result name)
  if(NOT SMP_UNITY)
    set(${result} ${ARGN} PARENT_SCOPE)
    return()
  endif()
  smp_batches(batches ${ARGN})
  set(compiled "")
  foreach(batch IN LISTS batches)
    string(REPLACE "|" ";" batch ${batch})
    set(text "")
    foreach(source IN LISTS batch)
      cmake_path(RELATIVE_PATH source BASE_DIRECTORY ${PROJECT_SOURCE_DIR})
      string(APPEND text "#include \"${source}\"\n")
    endforeach()
    smp_batch_name(output ${name} ${compiled})
    file(CONFIGURE OUTPUT ${output} CONTENT "${text}" @ONLY)
    list(APPEND compiled ${output})
  endforeach()
  set(${result} ${compiled} PARENT_SCOPE)
endfunction()

# smp_batch_name(RESULT NAME BEFORE...): the file of the batch after those.
function(smp_batch_name result name)
  list(LENGTH ARGN number)
  set(${result} ${CMAKE_BINARY_DIR}/generated/${name}/${name}_${number}.cpp PARENT_SCOPE)
endfunction()

# A class with a member of a type that only its source knows is fine there.
set(smp_unity_options "")
if(SMP_UNITY)
  set(smp_unity_options $<$<CXX_COMPILER_ID:GNU>:-Wno-subobject-linkage>)
endif()

# smp_unity_tests(RESULT NAME SOURCE...)
#
# Tests name things as they like, so each is put into a namespace of its own:
# a batch first includes, outside of any namespace, whatever its tests include,
# which makes their own includes do nothing. A test that cannot stand in a
# namespace says "alone" in its first line.
function(smp_unity_tests result name)
  set(compiled "")
  set(together "")
  foreach(source IN LISTS ARGN)
    file(STRINGS ${source} first LIMIT_COUNT 1)
    if(NOT SMP_UNITY OR first MATCHES "^// ctest:.* alone")
      list(APPEND compiled ${source})
    else()
      list(APPEND together ${source})
    endif()
  endforeach()
  smp_batches(batches ${together})
  set(script ${PROJECT_SOURCE_DIR}/cmake/unity_test_source.cmake)
  set(outputs "")
  foreach(batch IN LISTS batches)
    string(REPLACE "|" ";" batch ${batch})
    smp_batch_name(output ${name} ${outputs})
    add_custom_command(OUTPUT ${output}
      COMMAND ${CMAKE_COMMAND} -D ROOT=${PROJECT_SOURCE_DIR} -D OUTPUT=${output}
        "-DSOURCES=${batch}" -P ${script}
      DEPENDS ${batch} ${script} VERBATIM)
    list(APPEND outputs ${output})
  endforeach()
  set(${result} ${compiled} ${outputs} PARENT_SCOPE)
endfunction()
