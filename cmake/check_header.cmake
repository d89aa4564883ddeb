# Run by header_check.cmake for one header: writes PASSED, and beside it what
# the header includes.

cmake_minimum_required(VERSION 3.25)

set(source ${PASSED}.cpp)
set(text "#include \"${HEADER}\"\n#include \"${HEADER}\"\n")
set(options "")
if(PCH)
  # At the end of a file the compiler instantiates all templates that Torch's
  # inline functions use, which takes six of seven seconds. A header that comes
  # this far has been read, so the compiler is made to stop.
  set(end "the end of a header that passed")
  string(APPEND text "static_assert(false, \"${end}\");\n")
  set(options -Winvalid-pch -fpch-preprocess -Wfatal-errors -include ${PCH})
endif()
file(WRITE ${source} "${text}")

execute_process(
  COMMAND ${COMPILER} @${FLAGS} ${options} -fsyntax-only ${source}
  RESULT_VARIABLE status ERROR_VARIABLE output)
if(PCH)
  if(output MATCHES "${source}:3:[^\n]*error: [^\n]*${end}")
    set(status 0)
    string(REGEX REPLACE "${source}:3:[^\n]*error: .*" "" output "${output}")
  else()
    set(status 1)
  endif()
endif()
if(output)
  message(NOTICE "${output}")
endif()
if(NOT status EQUAL 0)
  message(FATAL_ERROR "${HEADER} does not compile alone")
endif()

# The names of the files only: a compiler that stops early does not list them.
execute_process(
  COMMAND ${COMPILER} @${FLAGS} ${options} -MM -MT ${PASSED} -MF ${PASSED}.d ${source}
  OUTPUT_QUIET COMMAND_ERROR_IS_FATAL ANY)
file(TOUCH ${PASSED})
