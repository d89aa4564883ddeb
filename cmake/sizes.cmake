# The test of sizes: no file over 600 lines, no function over 60, no line over
# 80 columns.
#
#   cmake -D ROOT=<tree> -P sizes.cmake

cmake_minimum_required(VERSION 3.25)

# What may be too long: expressions for whole lines of the output.
set(exceptions
  "tests/partition/print_test.cpp: a line of .*") # as smp prints it

set(files "")
foreach(folder transport partition tp actors runtime include apps python bench
    examples tests)
  file(GLOB_RECURSE found RELATIVE ${ROOT} ${ROOT}/${folder}/*.hpp ${ROOT}/${folder}/*.cpp
    ${ROOT}/${folder}/*.py)
  list(APPEND files ${found})
endforeach()
file(GLOB scripts RELATIVE ${ROOT} ${ROOT}/dev ${ROOT}/cmake/*)
list(APPEND files ${scripts})
if(NOT files)
  message(FATAL_ERROR "sizes: no source of smp in ${ROOT}")
endif()

execute_process(
  COMMAND ${CMAKE_COMMAND} -E env LC_ALL=C awk -v max_lines=600
    -v max_function=60 -v max_columns=80
    -f ${CMAKE_CURRENT_LIST_DIR}/sizes.awk ${files}
  WORKING_DIRECTORY ${ROOT} OUTPUT_VARIABLE output ERROR_VARIABLE trouble)
if(trouble)
  message(FATAL_ERROR "${trouble}")
endif()
string(REGEX MATCHALL "[^\n]+" lines "${output}")

set(errors 0)
foreach(line IN LISTS lines)
  string(REGEX REPLACE "^([^:]*):[0-9]+" "\\1" text "${line}")
  set(known FALSE)
  foreach(exception IN LISTS exceptions)
    if(text MATCHES "^${exception}$")
      set(known TRUE)
    endif()
  endforeach()
  if(NOT known)
    message(NOTICE "${line}")
    math(EXPR errors "${errors} + 1")
  endif()
endforeach()
list(LENGTH files count)
if(errors)
  message(FATAL_ERROR "sizes: ${errors} things too long in ${count} files")
endif()
message(STATUS "sizes: ${count} files, nothing is too long")
