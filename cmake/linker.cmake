# Links a program whose thread-local byte is the last one of a page, and expects
# it to start: see options.cmake.
#
#   cmake -D CXX=<compiler> -D OPTIONS=<link options> -D WORK=<scratch folder>
#     -P linker.cmake

cmake_minimum_required(VERSION 3.25)

string(REPLACE "LINKER:" "-Wl," OPTIONS "${OPTIONS}")
file(MAKE_DIRECTORY ${WORK})

# @param more bytes of code that do nothing
function(link more)
  file(WRITE ${WORK}/program.cpp
    "thread_local char last;\n"
    "__asm__(\".text\\n.skip ${more}, 0x90\\n\");\n"
    "int main() { return last; }\n")
  execute_process(COMMAND ${CXX} ${OPTIONS} program.cpp -o program
    WORKING_DIRECTORY ${WORK} COMMAND_ERROR_IS_FATAL ANY)
endfunction()

link(1)
execute_process(COMMAND readelf -SW ${WORK}/program OUTPUT_VARIABLE sections
  COMMAND_ERROR_IS_FATAL ANY)
if(NOT sections MATCHES "\\.tbss +NOBITS +([0-9a-f]+)")
  message(FATAL_ERROR "linker: no .tbss in\n${sections}")
endif()
math(EXPR more "(4095 - (0x${CMAKE_MATCH_1} & 4095)) & 4095")
foreach(near RANGE -16 16)
  math(EXPR size "(${more} + ${near} + 4096) % 4096 + 1")
  link(${size})
  execute_process(COMMAND ${WORK}/program RESULT_VARIABLE result
    ERROR_VARIABLE error)
  if(NOT result EQUAL 0)
    message(FATAL_ERROR "linker: a program ended with ${result}: ${error}")
  endif()
endforeach()
message(STATUS "linker: programs start wherever their parts lie")
