# One libFuzzer program per file of tests/fuzz: ucx_header_test.cpp is
# fuzz_ucx_header. `./dev fuzz` builds them in a build of their own, as the
# parsers have to be compiled for it too, by clang.

file(GLOB sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/tests/fuzz/*_test.cpp)
foreach(source IN LISTS sources)
  cmake_path(GET source STEM stem)
  string(REGEX REPLACE "_test$" "" name ${stem})
  add_executable(fuzz_${name} ${source})
  target_compile_definitions(fuzz_${name} PRIVATE SMP_LIBFUZZER)
  target_link_libraries(fuzz_${name} PRIVATE smp smp::fmt CAF::core Threads::Threads)
  target_link_options(fuzz_${name} PRIVATE -fsanitize=fuzzer)
  list(APPEND programs fuzz_${name})
endforeach()

# runtime/ is not in this libsmp; few of its units are needed.
target_sources(fuzz_value_tree PRIVATE
  ${PROJECT_SOURCE_DIR}/runtime/values/value.cpp
  ${PROJECT_SOURCE_DIR}/runtime/values/value_codec.cpp)
target_sources(fuzz_messages PRIVATE
  ${PROJECT_SOURCE_DIR}/runtime/base/call_context.cpp
  ${PROJECT_SOURCE_DIR}/runtime/calls/messages.cpp
  ${PROJECT_SOURCE_DIR}/runtime/values/tensor_bridge.cpp
  ${PROJECT_SOURCE_DIR}/runtime/values/value.cpp
  ${PROJECT_SOURCE_DIR}/runtime/values/value_codec.cpp)
target_link_libraries(fuzz_messages PRIVATE smp::torch)
target_sources(fuzz_manifest PRIVATE
  ${PROJECT_SOURCE_DIR}/runtime/files/errno_text.cpp
  ${PROJECT_SOURCE_DIR}/runtime/files/file_io.cpp
  ${PROJECT_SOURCE_DIR}/runtime/checkpoint/checksum.cpp
  ${PROJECT_SOURCE_DIR}/runtime/checkpoint/manifest.cpp)
target_link_libraries(fuzz_manifest PRIVATE smp::json)

add_custom_target(fuzz DEPENDS ${programs})
