# Tests: tests/<path>/<unit>_test.cpp. All tests of a folder are one program,
# and each file is a ctest, "<path>/<unit>": one process for all its cases,
# because to load LibTorch takes longer than most of them. Those of
# tests/python are programs of Python, "python/<unit>".
#
# A test may say what it needs in its first line:
#
#   // ctest: seconds=30 label=multiprocess processors=2 serial alone
#
# seconds     what all its cases take on two processors beside other tests, if
#             more than ten. The longest begin first, and a minute after ten
#             times that a test is ended (four times later under sanitizers).
# label       a ctest label; "multiprocess" also counts as two processors;
#             "proof": it runs for minutes, and `./dev test` takes a quarter of
#             those
# processors  how many of ctest's slots it takes, of which there are two for each
#             processor; with 4 a test has a small machine to itself
# serial      nothing else runs meanwhile (for what measures time)
# alone       is compiled by itself (cmake/unity.cmake)

# What the tests of each folder see beside libsmp, and those of a subfolder beside
# that. Torch is slow to compile, so only those get it that need it.
set(smp_test_libraries_transport smp::fmt smp::ucx)
set(smp_test_libraries_partition smp::fmt smp::json)
set(smp_test_libraries_actors smp::fmt smp::json CAF::core CAF::io)
set(smp_test_libraries_tp smp::smp)
set(smp_test_libraries_runtime smp::smp smp::json smp::toml)
set(smp_test_libraries_runtime_device smp_simulated_device)
set(smp_test_libraries_apps smp::smp smp_report smp::json smp::toml)
set(smp_test_libraries_apps_web smp_web)
set(smp_test_libraries_gpu smp::smp smp::json)
set(smp_test_libraries_fuzz smp::smp CAF::core)

# -- tests/support -------------------------------------------------------------
# support/torch/ is for the tests that see Torch, all else for everybody.

smp_sources(support tests/support)
set(torch_support ${support})
list(FILTER support EXCLUDE REGEX "/torch/")
list(FILTER torch_support INCLUDE REGEX "/torch/")

add_library(smp_test_support INTERFACE)
target_link_libraries(smp_test_support INTERFACE Catch2::Catch2)
if(support)
  add_library(smp_test_support_objects OBJECT ${support})
  target_link_libraries(smp_test_support_objects PUBLIC smp smp::fmt Catch2::Catch2)
  target_compile_options(smp_test_support_objects PRIVATE ${smp_test_options})
  target_link_libraries(smp_test_support INTERFACE
    smp_test_support_objects $<TARGET_OBJECTS:smp_test_support_objects>)
endif()

add_library(smp_test_support_torch INTERFACE)
target_link_libraries(smp_test_support_torch INTERFACE smp_test_support)
smp_wanted(wanted runtime)
if(torch_support AND wanted)
  add_library(smp_test_support_torch_objects OBJECT ${torch_support})
  target_link_libraries(smp_test_support_torch_objects PUBLIC smp::smp Catch2::Catch2)
  target_compile_options(smp_test_support_torch_objects PRIVATE ${smp_test_options})
  smp_precompile(smp_test_support_torch_objects TESTS)
  target_link_libraries(smp_test_support_torch INTERFACE
    smp_test_support_torch_objects $<TARGET_OBJECTS:smp_test_support_torch_objects>)
endif()

# -- tests/plugins -------------------------------------------------------------
# One plug-in per source file, for tests that load it; model_x.cpp sees Torch.

smp_wanted(wanted runtime)
smp_sources(plugins tests/plugins)
foreach(source IN LISTS plugins)
  cmake_path(GET source STEM name)
  if(NOT name MATCHES "^model_")
    add_library(${name} MODULE ${source})
    target_link_libraries(${name} PRIVATE smp smp::fmt CAF::core)
  elseif(wanted)
    add_library(${name} MODULE ${source})
    target_link_libraries(${name} PRIVATE smp::smp)
    smp_precompile(${name})
  else()
    continue()
  endif()
  set_target_properties(${name} PROPERTIES PREFIX "")
endforeach()

# -- tests/faults --------------------------------------------------------------

if(wanted)
  add_library(smp_faults MODULE tests/faults/fault.cpp)
  target_link_libraries(smp_faults PRIVATE smp smp::fmt)
  set_target_properties(smp_faults PROPERTIES PREFIX "")

  add_library(smp_fault_point MODULE tests/faults/fault_point.cpp)
  target_link_libraries(smp_fault_point PRIVATE smp::torch)
  target_include_directories(smp_fault_point PRIVATE ${PROJECT_SOURCE_DIR})
  set_target_properties(smp_fault_point PROPERTIES PREFIX "")
endif()

# -- tests/no_driver ----------------------------------------------------------
# NVIDIA's driver as far as smp asks it, which answers as a test wants: tests
# load or preload it. A library of that name that is loaded is found by it.

if(wanted)
  smp_sources(sources tests/no_driver)
  add_library(smp_no_driver SHARED ${sources})
  set_target_properties(smp_no_driver PROPERTIES PREFIX "" NO_SONAME ON)
  target_link_options(smp_no_driver PRIVATE -Wl,-soname,libcuda.so.1)
endif()

# -- tests/simulated -----------------------------------------------------------
# The device "sim" of LibTorch, which is there as soon as this is loaded: tests
# link it or preload it.

if(wanted)
  smp_sources(sources tests/simulated)
  smp_unity(compiled smp_simulated_device ${sources})
  add_library(smp_simulated_device SHARED ${compiled})
  target_include_directories(smp_simulated_device PUBLIC ${PROJECT_SOURCE_DIR})
  target_link_libraries(smp_simulated_device PUBLIC smp smp::torch smp::fmt
    Threads::Threads)
  target_compile_options(smp_simulated_device PRIVATE ${smp_unity_options})
  smp_sanitize(smp_simulated_device runtime)
  smp_precompile(smp_simulated_device)
  set_target_properties(smp_simulated_device PROPERTIES PREFIX "")
endif()

# -- the tests -----------------------------------------------------------------

# What R27 asks of a rank's environment, and where a test finds things.
set(smp_test_environment
  UCX_MEM_MMAP_HOOK_MODE=none UCX_MEMTYPE_CACHE=n UCX_DEBUG_SIGNO=0
  OMP_WAIT_POLICY=passive
  # A test names the device that it wants; only `./dev gpu-test` wants GPUs.
  SMP_CUDA=0
  GLIBC_TUNABLES=glibc.malloc.hugetlb=1
  SMP_BIN_DIR=${CMAKE_RUNTIME_OUTPUT_DIRECTORY}
  SMP_SOURCE_DIR=${PROJECT_SOURCE_DIR})
if(SMP_SANITIZE MATCHES "address")
  list(APPEND smp_test_environment
    LSAN_OPTIONS=suppressions=${PROJECT_SOURCE_DIR}/cmake/leaks_of_libraries.supp)
endif()

# Reads the first line of a test into the properties of its ctest.
function(smp_test_properties result test source)
  set(seconds 10)
  set(properties "")
  file(STRINGS ${source} first LIMIT_COUNT 1)
  if(first MATCHES "^(//|#) ctest: (.*)$")
    separate_arguments(words UNIX_COMMAND "${CMAKE_MATCH_2}")
    foreach(word IN LISTS words)
      if(word MATCHES "^seconds=([0-9]+)$")
        set(seconds ${CMAKE_MATCH_1})
      elseif(word MATCHES "^label=(.+)$")
        list(APPEND properties LABELS ${CMAKE_MATCH_1})
        if(CMAKE_MATCH_1 STREQUAL multiprocess)
          list(APPEND properties PROCESSORS 2)
        elseif(CMAKE_MATCH_1 STREQUAL proof)
          set_property(GLOBAL APPEND PROPERTY smp_proofs "${seconds} ${test}")
        endif()
      elseif(word MATCHES "^processors=([0-9]+)$")
        list(APPEND properties PROCESSORS ${CMAKE_MATCH_1})
      elseif(word STREQUAL alone)
        # for unity.cmake
      elseif(word STREQUAL serial)
        list(APPEND properties RUN_SERIAL ON)
      else()
        message(FATAL_ERROR "${source}:1: unknown setting '${word}'")
      endif()
    endforeach()
  endif()
  math(EXPR timeout "10 * ${seconds} + 60")
  if(SMP_SANITIZE)
    math(EXPR timeout "4 * ${timeout}")
  endif()
  list(APPEND properties TIMEOUT ${timeout} COST ${seconds})
  file(APPEND ${smp_test_seconds} "${test} ${seconds}\n")
  set(${result} ${properties} PARENT_SCOPE)
endfunction()

# For `./dev test` (cmake/test_run.sh).
set(smp_test_seconds ${CMAKE_BINARY_DIR}/tests/seconds.txt)
file(WRITE ${smp_test_seconds} "")

# One program of all tests in a folder: tests/runtime/calls -> runtime_calls_test.
function(smp_test_program path)
  string(REGEX MATCH "^[^/]*" folder ${path})
  if(NOT DEFINED smp_test_libraries_${folder})
    message(FATAL_ERROR "tests/${path}: there is no folder ${folder}")
  endif()
  smp_wanted(wanted ${folder})
  if(NOT wanted)
    return()
  endif()
  file(GLOB sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/tests/${path}/*_test.cpp)
  string(REPLACE "/" "_" name ${path})
  smp_unity_tests(compiled ${name} ${sources})
  set(program ${name}_test)
  add_executable(${program} ${compiled})
  set_target_properties(${program} PROPERTIES
    RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/tests)
  target_compile_options(${program} PRIVATE ${smp_test_options}
    ${smp_unity_options})
  smp_sanitize(${program} ${folder})
  set(libraries ${smp_test_libraries_${folder}})
  if(NOT path STREQUAL folder)
    list(APPEND libraries ${smp_test_libraries_${name}})
  endif()
  if(smp::smp IN_LIST libraries)
    target_link_libraries(${program} PRIVATE smp_test_support_torch)
    smp_precompile(${program} TESTS)
  else()
    target_link_libraries(${program} PRIVATE smp_test_support)
  endif()
  target_link_libraries(${program} PRIVATE smp ${libraries} Threads::Threads)
  foreach(source IN LISTS sources)
    cmake_path(GET source STEM stem)
    string(REGEX REPLACE "_test$" "" unit ${stem})
    smp_test_properties(properties ${path}/${unit} ${source})
    set(environment ${smp_test_environment})
    # OpenMP's teams wait in busy loops: tests with two threads each, side by
    # side on two processors, take twice as long as with one each.
    if(NOT PROCESSORS IN_LIST properties)
      list(APPEND environment OMP_NUM_THREADS=1)
    endif()
    # A file without a case fails: Catch2 ends with 2 then, with 42 if one
    # failed, with 4 if all were skipped.
    add_test(NAME ${path}/${unit} COMMAND ${program} "[#${stem}]~[.]"
      --reporter console --reporter cases::out=-)
    set_tests_properties(${path}/${unit} PROPERTIES SKIP_RETURN_CODE 4
      ENVIRONMENT "${environment}" ${properties})
  endforeach()
endfunction()

file(GLOB_RECURSE tests CONFIGURE_DEPENDS
  RELATIVE ${PROJECT_SOURCE_DIR}/tests ${PROJECT_SOURCE_DIR}/tests/*_test.cpp)
set(paths "")
foreach(test IN LISTS tests)
  cmake_path(GET test PARENT_PATH path)
  list(APPEND paths ${path})
endforeach()
list(REMOVE_DUPLICATES paths)
foreach(path IN LISTS paths)
  smp_test_program(${path})
endforeach()

# -- tests/python --------------------------------------------------------------
# Each file is a program; what ranks do together starts them itself (harness.py).

if(TARGET smp_core)
  file(GLOB tests CONFIGURE_DEPENDS RELATIVE ${PROJECT_SOURCE_DIR}/tests/python
    ${PROJECT_SOURCE_DIR}/tests/python/*_test.py)
  foreach(test IN LISTS tests)
    string(REGEX REPLACE "_test[.]py$" "" unit ${test})
    set(source ${PROJECT_SOURCE_DIR}/tests/python/${test})
    smp_test_properties(properties python/${unit} ${source})
    add_test(NAME python/${unit} COMMAND ${SMP_PYTHON} ${source})
    set_tests_properties(python/${unit} PROPERTIES ${properties}
      SKIP_RETURN_CODE 4
      ENVIRONMENT "${smp_test_environment};OMP_NUM_THREADS=1;PYTHONDONTWRITEBYTECODE=1;HF_HUB_OFFLINE=1;PYTHONPATH=${CMAKE_BINARY_DIR}/python")
  endforeach()
endif()

# Proof tests in four quarters of about the same length.
get_property(proofs GLOBAL PROPERTY smp_proofs)
list(SORT proofs COMPARE NATURAL ORDER DESCENDING)
set(number 0)
foreach(proof IN LISTS proofs)
  string(REGEX REPLACE "^[0-9]+ " "" test "${proof}")
  math(EXPR quarter "${number} % 4")
  math(EXPR number "${number} + 1")
  set_property(TEST ${test} APPEND PROPERTY LABELS proof-${quarter})
endforeach()

# A ctest that finds no case must not pass.
smp_wanted(wanted transport)
if(wanted)
  add_test(NAME no_case_selftest
    COMMAND transport_test "[#no_such_test]~[.]")
  set_tests_properties(no_case_selftest PROPERTIES WILL_FAIL ON)
endif()

# What a few folders that are compiled for sanitizers do in a run of processes.
if(SMP_SANITIZE_ONLY)
  add_test(NAME training COMMAND smp-train
    ${PROJECT_SOURCE_DIR}/config/quickstart.toml --train.steps=3)
  set_tests_properties(training PROPERTIES
    ENVIRONMENT "${smp_test_environment}" PROCESSORS 2 TIMEOUT 600 COST 60
    PASS_REGULAR_EXPRESSION "done after 3 of 3 steps")
  add_custom_target(sanitized DEPENDS smp-train)
  foreach(path IN LISTS paths)
    string(REGEX MATCH "^[^/]*" folder ${path})
    if(folder IN_LIST SMP_SANITIZE_ONLY)
      string(REPLACE "/" "_" name ${path})
      add_dependencies(sanitized ${name}_test)
    endif()
  endforeach()
endif()

# All that tests start, load and install, for who builds one of their programs
# only (`./dev case`).
add_custom_target(test_equipment)
get_property(targets DIRECTORY PROPERTY BUILDSYSTEM_TARGETS)
foreach(target IN LISTS targets)
  get_target_property(type ${target} TYPE)
  if(type MATCHES "^(EXECUTABLE|SHARED_LIBRARY|MODULE_LIBRARY)$"
      AND NOT target MATCHES "_test$|^bench_")
    add_dependencies(test_equipment ${target})
  endif()
endforeach()

# -- CUDA ----------------------------------------------------------------------

find_program(SMP_NVCC nvcc HINTS /usr/local/cuda/bin)
if(SMP_NVCC AND TARGET smp_cuda)
  add_test(NAME cuda_by_nvcc
    COMMAND ${SMP_NVCC} -x cu -std=c++20 -c -o ${CMAKE_BINARY_DIR}/tests/cuda_by_nvcc.o
      -I${PROJECT_SOURCE_DIR} -I${SMP_TORCH_DIR}/include
      ${PROJECT_SOURCE_DIR}/runtime/device/cuda/module.cpp)
  set_tests_properties(cuda_by_nvcc PROPERTIES COST 20 TIMEOUT 300)
endif()

# -- tests of the source tree --------------------------------------------------

add_test(NAME layering COMMAND ${CMAKE_COMMAND}
  -D ROOT=${PROJECT_SOURCE_DIR} -P ${PROJECT_SOURCE_DIR}/cmake/layering.cmake)
add_test(NAME layering_selftest COMMAND ${CMAKE_COMMAND}
  -D WORK=${CMAKE_BINARY_DIR}/layering_selftest
  -P ${PROJECT_SOURCE_DIR}/cmake/layering_selftest.cmake)
add_test(NAME docs COMMAND ${CMAKE_COMMAND}
  -D ROOT=${PROJECT_SOURCE_DIR} -P ${PROJECT_SOURCE_DIR}/cmake/docs.cmake)
add_test(NAME docs_selftest COMMAND ${CMAKE_COMMAND}
  -D WORK=${CMAKE_BINARY_DIR}/docs_selftest
  -P ${PROJECT_SOURCE_DIR}/cmake/docs_selftest.cmake)
add_test(NAME sizes COMMAND ${CMAKE_COMMAND}
  -D ROOT=${PROJECT_SOURCE_DIR} -P ${PROJECT_SOURCE_DIR}/cmake/sizes.cmake)

add_test(NAME sizes_selftest COMMAND ${CMAKE_COMMAND}
  -D WORK=${CMAKE_BINARY_DIR}/sizes_selftest
  -P ${PROJECT_SOURCE_DIR}/cmake/sizes_selftest.cmake)
