# Writes OUTPUT, which compiles SOURCES together; see unity.cmake.

cmake_minimum_required(VERSION 3.25)

set(includes "")
set(bodies "")
foreach(source IN LISTS SOURCES)
  file(STRINGS ${source} lines REGEX "^#include")
  list(APPEND includes ${lines})
  cmake_path(RELATIVE_PATH source BASE_DIRECTORY ${ROOT} OUTPUT_VARIABLE path)
  string(REGEX REPLACE "[^A-Za-z0-9]" "_" name "${path}")
  string(APPEND bodies "\nnamespace ${name} {\n#include \"${path}\"\n}\n")
  # A macro knows no namespace.
  file(STRINGS ${source} macros REGEX "^# *define ")
  foreach(macro IN LISTS macros)
    string(REGEX REPLACE "^# *define +([A-Za-z0-9_]+).*" "#undef \\1" macro "${macro}")
    string(APPEND bodies "${macro}\n")
  endforeach()
endforeach()
list(REMOVE_DUPLICATES includes)
list(JOIN includes "\n" includes)
file(CONFIGURE OUTPUT ${OUTPUT} @ONLY CONTENT "@includes@\n@bodies@")
