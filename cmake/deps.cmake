# Imported targets for everything that smp uses. Also installed, for the users
# of find_package(smp).
#
# All of them are IMPORTED, so their headers count as system headers and our
# warnings do not look into them.

include_guard(GLOBAL)

function(smp_require_file path variable)
  if(NOT EXISTS ${path})
    message(FATAL_ERROR "${path} not found: set ${variable} (run ./dev, or see README)")
  endif()
endfunction()

# -- LibTorch ------------------------------------------------------------------
# Not by its own package file: that wants the whole wheel, Python and CUDA
# included. Never link libtorch.so, which needs the CUDA libraries' names.

smp_require_file(${SMP_TORCH_DIR}/lib/libtorch_cpu.so SMP_TORCH_DIR)

add_library(smp::c10 SHARED IMPORTED)
set_target_properties(smp::c10 PROPERTIES
  IMPORTED_LOCATION ${SMP_TORCH_DIR}/lib/libc10.so
  INTERFACE_INCLUDE_DIRECTORIES "${SMP_TORCH_DIR}/include;${SMP_TORCH_DIR}/include/torch/csrc/api/include")

add_library(smp::torch_cpu SHARED IMPORTED)
set_target_properties(smp::torch_cpu PROPERTIES
  IMPORTED_LOCATION ${SMP_TORCH_DIR}/lib/libtorch_cpu.so
  INTERFACE_LINK_LIBRARIES smp::c10)

add_library(smp::torch INTERFACE IMPORTED)
target_link_libraries(smp::torch INTERFACE smp::torch_cpu smp::c10)

# -- the CUDA runtime ----------------------------------------------------------
# Only its wheel beside LibTorch: libtorch_cpu loads that library anyway. Its
# headers include some that are in a wheel of their own, or in the CUDA Toolkit.

set(smp_cuda_dir ${SMP_TORCH_DIR}/../nvidia/cu13)
find_path(SMP_CUDA_CRT_DIR crt/host_defines.h
  HINTS ${smp_cuda_dir}/include PATHS /usr/local/cuda/include)
mark_as_advanced(SMP_CUDA_CRT_DIR)
set(smp_cuda_header ${smp_cuda_dir}/include/cuda_runtime_api.h)
if(EXISTS ${smp_cuda_header} AND SMP_CUDA_CRT_DIR)
  add_library(smp::cudart SHARED IMPORTED)
  set_target_properties(smp::cudart PROPERTIES
    IMPORTED_LOCATION ${smp_cuda_dir}/lib/libcudart.so.13
    INTERFACE_INCLUDE_DIRECTORIES "${smp_cuda_dir}/include;${SMP_CUDA_CRT_DIR}")
elseif(EXISTS ${smp_cuda_header})
  message(STATUS "without CUDA, as crt/host_defines.h is missing: install the "
    "CUDA Toolkit, or nvidia-cuda-crt beside nvidia-cuda-runtime")
endif()

# -- fmt -----------------------------------------------------------------------
# The copy in LibTorch's headers wins wherever those are seen, so it is used
# everywhere: two versions in one program would clash. Files without Torch find
# it in a directory that holds nothing else.

set(smp_fmt_include ${CMAKE_BINARY_DIR}/fmt_include)
file(MAKE_DIRECTORY ${smp_fmt_include})
file(CREATE_LINK ${SMP_TORCH_DIR}/include/fmt ${smp_fmt_include}/fmt SYMBOLIC)
add_library(smp::fmt INTERFACE IMPORTED)
set_target_properties(smp::fmt PROPERTIES
  INTERFACE_INCLUDE_DIRECTORIES ${smp_fmt_include}
  INTERFACE_COMPILE_DEFINITIONS FMT_HEADER_ONLY=1)

# -- the rest, which programs that merely use smp do not need ------------------

if(SMP_DEPS_FOR_USERS)
  return()
endif()

find_package(ucx 1.22 CONFIG REQUIRED PATHS ${SMP_UCX_DIR} NO_DEFAULT_PATH)
add_library(smp::ucx INTERFACE IMPORTED)
# Its targets do not link each other.
target_link_libraries(smp::ucx INTERFACE ucx::ucp ucx::ucs)

find_package(Threads REQUIRED)
find_package(OpenSSL REQUIRED) # before CAF, whose package file does not say so
find_package(CAF 0.18.7 EXACT REQUIRED COMPONENTS core io openssl
  PATHS ${SMP_CAF_DIR} NO_DEFAULT_PATH)
find_package(Boost 1.74 REQUIRED)

# Header-only libraries below the compiler's own include path.
add_library(smp::json INTERFACE IMPORTED)
add_library(smp::toml INTERFACE IMPORTED)
add_library(smp::cli11 INTERFACE IMPORTED)
find_path(SMP_JSON_INCLUDE nlohmann/json.hpp REQUIRED)
find_path(SMP_TOML_INCLUDE toml++/toml.h REQUIRED)
find_path(SMP_CLI11_INCLUDE CLI/CLI.hpp REQUIRED)
find_path(SMP_PROTOZERO_INCLUDE protozero/pbf_writer.hpp REQUIRED)

# Of smp-top.
set(CURSES_NEED_WIDE TRUE)
find_package(Curses REQUIRED)
add_library(smp::ncurses INTERFACE IMPORTED)
set_target_properties(smp::ncurses PROPERTIES
  INTERFACE_INCLUDE_DIRECTORIES "${CURSES_INCLUDE_DIRS}")
target_link_libraries(smp::ncurses INTERFACE ${CURSES_LIBRARIES})

if(SMP_TESTS)
  find_package(Catch2 3 CONFIG REQUIRED PATHS ${SMP_CATCH2_DIR} NO_DEFAULT_PATH)
endif()
