# Everything that can be chosen at configure time, and the compiler's settings.

# Where the dependencies are. ./dev installs them and says so in the environment.
set(SMP_TORCH_DIR "" CACHE PATH "LibTorch: the folder that holds include/ and lib/")
set(SMP_UCX_DIR "" CACHE PATH "UCX 1.22 or newer: its install prefix")
set(SMP_CAF_DIR "" CACHE PATH "CAF 0.18.7: its install prefix")
set(SMP_CATCH2_DIR "" CACHE PATH "Catch2 3: its install prefix")
foreach(variable SMP_TORCH_DIR SMP_UCX_DIR SMP_CAF_DIR SMP_CATCH2_DIR)
  if(NOT ${variable} AND DEFINED ENV{${variable}})
    set_property(CACHE ${variable} PROPERTY VALUE $ENV{${variable}})
  endif()
endforeach()

set(SMP_PYTHON "" CACHE FILEPATH
  "A Python with the PyTorch of SMP_TORCH_DIR, for the Python package; empty: it is not made")
if(NOT SMP_PYTHON AND DEFINED ENV{SMP_PYTHON})
  set_property(CACHE SMP_PYTHON PROPERTY VALUE $ENV{SMP_PYTHON})
endif()

set(SMP_SANITIZE "" CACHE STRING "Sanitizers, as for -fsanitize=")
set(SMP_SANITIZE_ONLY "" CACHE STRING
  "Folders that are compiled for them with their tests, all of smp if empty; what else is linked is that of a release, and comes from ccache")
set(SMP_ONLY "" CACHE STRING
  "Folders that go into libsmp, all if empty; for work on one while another does not build")
option(SMP_TESTS "Build the tests" ON)
option(SMP_UNITY "Compile several sources of a folder at a time" ON)
option(SMP_PCH "Precompile torch/torch.h (halves the time of a file that uses it)" ON)

if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "" FORCE)
endif()

set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
# Also for programs: with one set of flags all files share one precompiled
# header.
add_compile_options(-fPIC -Wall -Wextra)
# GCC spends a quarter of its time on freeing memory that it could keep: a file
# that includes Torch takes 2 GB either way.
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  add_compile_options(--param=ggc-min-expand=400 --param=ggc-min-heapsize=2500000)
endif()
# Asserts stay on: they cost nothing next to a kernel.
set(CMAKE_CXX_FLAGS_RELEASE "-O2")
# Full debug information of a file that includes Torch is 100 MB.
set(CMAKE_CXX_FLAGS_DEBUG "-O1 -g1 -fno-omit-frame-pointer")

set(smp_sanitizer_options "")
if(SMP_SANITIZE)
  list(APPEND smp_sanitizer_options
    -fsanitize=${SMP_SANITIZE} -fno-sanitize-recover=all)
  add_link_options(-fsanitize=${SMP_SANITIZE})
  # GCC takes what its own checks insert for reads of what nobody has written
  # (seen in LibTorch's headers).
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    list(APPEND smp_sanitizer_options -Wno-maybe-uninitialized)
  endif()
  # LibTorch keeps the type information of some of its classes to itself, and
  # the check of dynamic types wants that of every class it meets.
  if(SMP_SANITIZE MATCHES "undefined")
    list(APPEND smp_sanitizer_options -fno-sanitize=vptr)
  endif()
  if(NOT SMP_SANITIZE_ONLY)
    add_compile_options(${smp_sanitizer_options})
  endif()
endif()

# smp_sanitize(TARGET FOLDER): if TARGET, which belongs to FOLDER, is one of a few
# that are compiled for sanitizers.
function(smp_sanitize target folder)
  if(folder IN_LIST SMP_SANITIZE_ONLY)
    target_compile_options(${target} PRIVATE ${smp_sanitizer_options}
      -O1 -g1 -fno-omit-frame-pointer)
  endif()
endfunction()

set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin)
set(CMAKE_LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/lib)
if(NOT SKBUILD) # a wheel knows where others are: cmake/wheel.cmake
  set(CMAKE_INSTALL_RPATH_USE_LINK_PATH ON)
endif()
list(APPEND CMAKE_INSTALL_RPATH "$ORIGIN/../lib")

find_program(SMP_CCACHE ccache)
if(SMP_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  # What ccache asks for to work with precompiled headers; and every clone finds
  # what another one has compiled.
  set(CMAKE_CXX_COMPILER_LAUNCHER ${CMAKE_COMMAND} -E env
    CCACHE_SLOPPINESS=pch_defines,time_macros CCACHE_BASEDIR=${PROJECT_SOURCE_DIR}
    ${SMP_CCACHE})
endif()

# The mold of Debian 12 (1.10) now and then spins for ever, and lets what the
# loader makes read-only begin at a thread-local byte, so that one program in some
# 500 does not start.
find_program(SMP_MOLD mold)
find_program(SMP_GOLD ld.gold)
if(SMP_MOLD)
  execute_process(COMMAND ${SMP_MOLD} --version OUTPUT_VARIABLE SMP_MOLD_VERSION)
  string(REGEX MATCH "[0-9]+" SMP_MOLD_VERSION "${SMP_MOLD_VERSION}")
endif()
if(SMP_MOLD AND SMP_MOLD_VERSION GREATER 1)
  add_link_options(-fuse-ld=mold)
elseif(SMP_GOLD)
  add_link_options(-fuse-ld=gold)
endif()
