# libsmp once more, with seeded faults (runtime/base/fault.hpp), for the test
# that asks whether `smp-train verify` finds them. Programs load it in place of
# libsmp when LD_LIBRARY_PATH names its folder. Only the sources that hold a
# fault are compiled again; the other objects are those of libsmp.

file(GLOB_RECURSE sources RELATIVE ${PROJECT_SOURCE_DIR}
  ${PROJECT_SOURCE_DIR}/runtime/*.cpp)
set(smp_fault_sources "")
foreach(source IN LISTS sources)
  file(STRINGS ${PROJECT_SOURCE_DIR}/${source} found REGEX "SMP_FAULT\\(" LIMIT_COUNT 1)
  if(found)
    list(APPEND smp_fault_sources ${source})
  endif()
endforeach()

function(smp_add_faulty_library)
  smp_wanted(wanted runtime)
  if(NOT wanted)
    return()
  endif()
  set(objects "")
  set(libraries "")
  get_property(folders GLOBAL PROPERTY smp_folders)
  foreach(folder IN LISTS folders)
    smp_folder_target(name ${folder})
    list(APPEND libraries ${name}_headers)
  endforeach()
  get_property(names GLOBAL PROPERTY smp_object_libraries)
  foreach(name IN LISTS names)
    list(APPEND objects $<TARGET_OBJECTS:${name}>)
  endforeach()
  if(SMP_UNITY)
    set(without "_faults_cxx[.]cxx[.]o$|_faults_cxx[.]cpp[.]o$")
  else()
    list(JOIN smp_fault_sources "|" without)
    string(REPLACE "." "[.]" without "/(${without}).o$")
  endif()
  set(sources ${smp_fault_sources})
  list(TRANSFORM sources PREPEND ${PROJECT_SOURCE_DIR}/)
  add_library(smp_faulty SHARED ${sources} tests/faults/fault.cpp
    ${SMP_BUILD_ID_SOURCE} "$<FILTER:${objects},EXCLUDE,${without}>")
  smp_unity(smp_faulty ${sources})
  add_dependencies(smp_faulty smp_build_id)
  target_compile_definitions(smp_faulty PRIVATE SMP_FAULTS)
  target_link_libraries(smp_faulty PRIVATE ${libraries})
  smp_precompile(smp_faulty)
  set_target_properties(smp_faulty PROPERTIES
    OUTPUT_NAME smp
    LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/faulty
    VERSION ${PROJECT_VERSION} SOVERSION ${PROJECT_VERSION_MAJOR})
endfunction()
