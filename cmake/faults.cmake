# libsmp once more, with seeded faults (runtime/fault.hpp), for the test that
# asks whether `smp-train verify` finds them. Programs load it in place of
# libsmp when LD_LIBRARY_PATH names its folder. Only the sources that hold a
# fault are compiled again; the other objects are those of libsmp.

smp_wanted(wanted runtime)
if(NOT wanted)
  return()
endif()

set(fault_sources
  runtime/distributed_model.cpp
  runtime/distributed_optimizer.cpp
  runtime/engine.cpp
  runtime/models/gpt.cpp
  runtime/owner_calls.cpp
  runtime/sequential.cpp
  runtime/wire_ops.cpp)

set(objects "")
set(libraries "")
get_property(folders GLOBAL PROPERTY smp_folders)
foreach(folder IN LISTS folders)
  smp_folder_target(name ${folder})
  if(TARGET ${name})
    list(APPEND objects $<TARGET_OBJECTS:${name}>)
    list(APPEND libraries ${name}_headers)
  endif()
endforeach()
list(JOIN fault_sources "|" without)
string(REPLACE "." "[.]" without "/(${without}).o$")

add_library(smp_faulty SHARED ${fault_sources} tests/faults/fault.cpp
  ${SMP_BUILD_ID_SOURCE} "$<FILTER:${objects},EXCLUDE,${without}>")
add_dependencies(smp_faulty smp_build_id)
target_compile_definitions(smp_faulty PRIVATE SMP_FAULTS)
target_link_libraries(smp_faulty PRIVATE ${libraries})
smp_precompile(smp_faulty)
set_target_properties(smp_faulty PROPERTIES
  OUTPUT_NAME smp
  LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/faulty
  VERSION ${PROJECT_VERSION} SOVERSION ${PROJECT_VERSION_MAJOR})
