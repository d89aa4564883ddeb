# Sources are found, not listed: one file is one unit and nothing is
# conditional, so a list would only repeat what the folder says.

# smp_sources(RESULT FOLDER [EXCLUDE SUBFOLDER...])
function(smp_sources result folder)
  cmake_parse_arguments(PARSE_ARGV 2 arg "" "" EXCLUDE)
  file(GLOB_RECURSE sources CONFIGURE_DEPENDS
    RELATIVE ${PROJECT_SOURCE_DIR} ${PROJECT_SOURCE_DIR}/${folder}/*.cpp)
  foreach(other IN LISTS arg_EXCLUDE)
    list(FILTER sources EXCLUDE REGEX "^${other}/")
  endforeach()
  list(TRANSFORM sources PREPEND ${PROJECT_SOURCE_DIR}/)
  set(${result} ${sources} PARENT_SCOPE)
endfunction()

# Whether SMP_ONLY leaves FOLDER in; apps, benchmarks and their tests need all.
function(smp_wanted result folder)
  set(${result} TRUE PARENT_SCOPE)
  if(SMP_ONLY AND NOT folder IN_LIST SMP_ONLY)
    set(${result} FALSE PARENT_SCOPE)
  endif()
endfunction()

# The name of a folder's object library: transport/ucx -> smp_transport_ucx.
function(smp_folder_target result folder)
  string(REPLACE "/" "_" name ${folder})
  set(${result} smp_${name} PARENT_SCOPE)
endfunction()

set_property(GLOBAL PROPERTY smp_folders "")

# smp_folder(FOLDER LIBRARY... [PCH] [EXCLUDE SUBFOLDER...])
#
# Makes an object library of all sources below FOLDER and hands it to libsmp.
# It sees the headers of the given libraries and no others. The interface
# library NAME_headers carries the same for the header check. A folder without
# sources has no object library yet.
function(smp_folder folder)
  cmake_parse_arguments(PARSE_ARGV 1 arg "PCH" "" "EXCLUDE")
  smp_folder_target(name ${folder})
  add_library(${name}_headers INTERFACE)
  target_include_directories(${name}_headers INTERFACE ${PROJECT_SOURCE_DIR})
  target_link_libraries(${name}_headers INTERFACE ${arg_UNPARSED_ARGUMENTS})
  set_property(GLOBAL APPEND PROPERTY smp_folders ${folder})
  set_property(GLOBAL PROPERTY ${name}_exclude ${arg_EXCLUDE})
  smp_sources(sources ${folder} EXCLUDE ${arg_EXCLUDE})
  smp_wanted(wanted ${folder})
  if(NOT sources OR NOT wanted)
    return()
  endif()
  set(with "")
  set(without ${sources})
  if(arg_PCH AND SMP_PCH)
    smp_split(with without ${sources})
  endif()
  smp_objects(${name} ${without})
  smp_objects(${name}_torch ${with})
  if(with)
    smp_precompile(${name}_torch)
  endif()
endfunction()

# Makes the object library NAME for smp_folder.
macro(smp_objects target)
  if(${ARGC} GREATER 1)
    smp_unity(compiled ${target} ${ARGN})
    add_library(${target} OBJECT ${compiled})
    target_compile_options(${target} PRIVATE ${smp_unity_options})
    smp_sanitize(${target} ${folder})
    target_link_libraries(${target} PUBLIC ${name}_headers)
    set_property(GLOBAL APPEND PROPERTY smp_object_libraries ${target})
  endif()
endmacro()

# Tests wait for what is in libsmp, and that is optimised: to compile them takes
# a third less without the rest of -O2.
set(smp_test_options "")
if(CMAKE_BUILD_TYPE STREQUAL Release)
  set(smp_test_options -O1)
endif()

# smp_precompile(TARGET [TESTS]): makes TARGET use the precompiled torch/torch.h,
# or, with TESTS, what most tests that see Torch include, and their options. Each
# is made once, by a target that compiles nothing else.
function(smp_precompile target)
  if(NOT SMP_PCH)
    return()
  endif()
  set(pch smp_torch_pch)
  set(headers <torch/torch.h> <fmt/format.h>)
  set(libraries smp::torch smp::fmt)
  set(options -fpch-preprocess)
  if(TESTS IN_LIST ARGN)
    set(pch smp_test_pch)
    list(APPEND headers <tests/support/catch.hpp> <smp/smp.hpp>)
    list(APPEND libraries Catch2::Catch2)
    list(APPEND options ${smp_test_options})
  endif()
  if(NOT TARGET ${pch})
    set(source ${CMAKE_BINARY_DIR}/generated/${pch}.cpp)
    file(CONFIGURE OUTPUT ${source} CONTENT "// holds the precompiled header\n")
    add_library(${pch} OBJECT ${source})
    target_link_libraries(${pch} PRIVATE ${libraries})
    target_include_directories(${pch} PRIVATE
      ${PROJECT_SOURCE_DIR} ${PROJECT_SOURCE_DIR}/include)
    target_precompile_headers(${pch} PRIVATE ${headers})
    target_compile_options(${pch} PRIVATE ${options})
  endif()
  target_compile_options(${target} PRIVATE -fpch-preprocess)
  target_precompile_headers(${target} REUSE_FROM ${pch})
endfunction()

# The same if one of the sources is faster with it.
function(smp_precompile_if_used target)
  smp_split(with without ${ARGN})
  if(with)
    smp_precompile(${target})
  endif()
endfunction()

# Links libsmp of all folders.
#
#   smp       the library and the headers that need nothing else
#   smp::smp  what a user links: the same with LibTorch and fmt
function(smp_add_library)
  add_library(smp SHARED ${SMP_BUILD_ID_SOURCE})
  add_dependencies(smp smp_build_id)
  target_include_directories(smp PUBLIC
    $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}>
    $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include>
    $<INSTALL_INTERFACE:include> $<INSTALL_INTERFACE:include/smp/detail>)
  get_property(libraries GLOBAL PROPERTY smp_object_libraries)
  foreach(library IN LISTS libraries)
    target_link_libraries(smp PRIVATE $<BUILD_INTERFACE:${library}>)
  endforeach()
  set_target_properties(smp PROPERTIES
    VERSION ${PROJECT_VERSION} SOVERSION ${PROJECT_VERSION_MAJOR}
    EXPORT_NAME core)
  # Headers want it of a program that says nothing of a standard.
  target_compile_features(smp PUBLIC cxx_std_20)
  add_library(smp_user INTERFACE)
  target_link_libraries(smp_user INTERFACE smp smp::torch smp::fmt)
  set_target_properties(smp_user PROPERTIES EXPORT_NAME smp)
  add_library(smp::smp ALIAS smp_user)
endfunction()

# smp_add_cuda(FOLDER): libsmp_cuda of its sources, which libsmp loads on a
# machine with a GPU. Without headers of CUDA it cannot be made.
function(smp_add_cuda folder)
  smp_wanted(wanted runtime)
  if(NOT wanted OR NOT TARGET smp::cudart)
    return()
  endif()
  smp_sources(sources ${folder})
  add_library(smp_cuda MODULE ${sources})
  target_include_directories(smp_cuda PRIVATE ${PROJECT_SOURCE_DIR})
  target_link_libraries(smp_cuda PRIVATE smp smp::c10 smp::cudart)
  # Whoever links smp::smp has it built, too.
  add_dependencies(smp_user smp_cuda)
  install(TARGETS smp_cuda LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
endfunction()

# smp_add_python(FOLDER): the packages smp and smdistributed for Python in
# build/*/python; FOLDER/extension is compiled. Without a Python they are not made.
function(smp_add_python folder)
  smp_wanted(wanted runtime)
  # Sanitizers would have to be in Python itself.
  if(NOT wanted OR NOT SMP_PYTHON OR SMP_SANITIZE)
    return()
  endif()
  set(Python_EXECUTABLE ${SMP_PYTHON})
  find_package(Python 3.10 COMPONENTS Interpreter Development.Module)
  execute_process(COMMAND ${SMP_PYTHON} -c
    "from importlib.metadata import version; print(version('torch'))"
    OUTPUT_VARIABLE version ERROR_QUIET OUTPUT_STRIP_TRAILING_WHITESPACE)
  file(STRINGS ${SMP_TORCH_DIR}/include/torch/headeronly/version.h wanted
    REGEX "define TORCH_VERSION_(MAJOR|MINOR) ")
  string(REGEX REPLACE ".*MAJOR ([0-9]+).*MINOR ([0-9]+).*" "\\1.\\2" wanted
    "${wanted}")
  # Whoever makes a wheel needs the headers, whoever installs it PyTorch.
  if(NOT Python_FOUND OR NOT (SKBUILD OR version MATCHES "^${wanted}[.]"))
    message(STATUS "the Python package is not made: ${SMP_PYTHON} needs headers "
      "(it has them: ${Python_FOUND}) and PyTorch ${wanted} (it has: ${version})")
    return()
  endif()
  smp_sources(sources ${folder}/extension)
  Python_add_library(smp_core MODULE WITH_SOABI ${sources})
  set(package ${CMAKE_BINARY_DIR}/python/smp)
  # A program that imports torch has this library; to link, its name is enough.
  file(CONFIGURE OUTPUT ${CMAKE_BINARY_DIR}/generated/torch_python.cpp
    CONTENT "// stands for the library that a Python program has\n")
  add_library(smp_torch_python SHARED
    ${CMAKE_BINARY_DIR}/generated/torch_python.cpp)
  set_target_properties(smp_torch_python PROPERTIES OUTPUT_NAME torch_python
    LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/generated)
  target_link_libraries(smp_core PRIVATE smp::smp CAF::core
    -Wl,--no-as-needed smp_torch_python -Wl,--as-needed)
  # Without a path to the one above.
  set_target_properties(smp_core PROPERTIES OUTPUT_NAME _core
    LIBRARY_OUTPUT_DIRECTORY ${package}
    BUILD_RPATH "$<TARGET_FILE_DIR:smp>" SKIP_BUILD_RPATH OFF
    BUILD_WITH_INSTALL_RPATH ON INSTALL_RPATH "$<TARGET_FILE_DIR:smp>"
    CXX_VISIBILITY_PRESET hidden)
  set(from ${PROJECT_SOURCE_DIR}/${folder})
  file(GLOB_RECURSE modules CONFIGURE_DEPENDS RELATIVE ${from} ${from}/smp/*.py
    ${from}/smp/py.typed ${from}/smdistributed/*.py)
  foreach(module IN LISTS modules)
    set(link ${CMAKE_BINARY_DIR}/python/${module})
    cmake_path(GET link PARENT_PATH parent)
    file(MAKE_DIRECTORY ${parent})
    file(CREATE_LINK ${from}/${module} ${link} SYMBOLIC)
  endforeach()
endfunction()

# smp_embed(RESULT FILE...): a source with the text of each file, of page.css as
# smp::app::page_css_text.
function(smp_embed result)
  set(text "namespace smp::app {\n")
  foreach(file IN LISTS ARGN)
    set(path ${PROJECT_SOURCE_DIR}/${file})
    set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${path})
    file(READ ${path} content)
    cmake_path(GET path FILENAME name)
    string(MAKE_C_IDENTIFIER ${name} name)
    string(APPEND text "extern const char* const ${name}_text;\n"
      "const char* const ${name}_text = R\"embedded(${content})embedded\";\n")
  endforeach()
  set(output ${CMAKE_BINARY_DIR}/generated/embedded.cpp)
  file(CONFIGURE OUTPUT ${output} CONTENT "${text}}\n" @ONLY)
  set(${result} ${output} PARENT_SCOPE)
endfunction()

# smp_viewers(FOLDER PROGRAM...): programs that look at runs. To load LibTorch
# takes a second, in which they have to answer, so they are linked with the
# folders below runtime/ instead of libsmp. What they share with each other, with
# other programs and with tests is in FOLDER/report; the page and what serves it
# is in FOLDER/web.
function(smp_viewers folder)
  smp_wanted(wanted runtime)
  if(NOT wanted)
    return()
  endif()
  smp_sources(sources ${folder}/report)
  smp_unity(compiled smp_report ${sources})
  add_library(smp_report OBJECT ${compiled})
  target_compile_options(smp_report PRIVATE ${smp_unity_options})
  target_link_libraries(smp_report PUBLIC smp_actors_headers smp::json smp::toml)
  smp_sources(sources ${folder}/web)
  smp_unity(compiled smp_web ${sources})
  smp_embed(page ${folder}/web/page.html ${folder}/web/page.css ${folder}/web/page.js)
  add_library(smp_web OBJECT ${compiled} ${page})
  target_compile_options(smp_web PRIVATE ${smp_unity_options})
  target_link_libraries(smp_web PUBLIC smp_report)
  add_library(smp_viewer INTERFACE)
  set(parts smp_transport smp_partition smp_actors)
  target_link_libraries(smp_viewer INTERFACE smp_report ${parts}
    smp_transport_headers smp_actors_headers smp::cli11)
  foreach(part smp_report ${parts})
    target_link_libraries(smp_viewer INTERFACE $<TARGET_OBJECTS:${part}>)
  endforeach()
  foreach(name IN LISTS ARGN)
    smp_sources(sources ${folder}/${name})
    smp_unity(compiled ${name} ${sources})
    add_executable(${name} ${compiled})
    target_compile_options(${name} PRIVATE ${smp_unity_options})
    target_link_libraries(${name} PRIVATE smp_viewer)
    install(TARGETS ${name})
  endforeach()
endfunction()

# smp_apps(FOLDER LIBRARY...): one program per subfolder, named after it, unless
# it is a viewer.
function(smp_apps folder)
  smp_wanted(wanted runtime)
  if(NOT wanted)
    return()
  endif()
  file(GLOB programs CONFIGURE_DEPENDS LIST_DIRECTORIES true
    RELATIVE ${PROJECT_SOURCE_DIR}/${folder} ${PROJECT_SOURCE_DIR}/${folder}/*)
  foreach(name IN LISTS programs)
    smp_sources(sources ${folder}/${name})
    if(NOT sources OR name MATCHES "^(report|web)$" OR TARGET ${name})
      continue()
    endif()
    smp_unity(compiled ${name} ${sources})
    add_executable(${name} ${compiled})
    target_compile_options(${name} PRIVATE ${smp_unity_options})
    target_link_libraries(${name} PRIVATE smp::smp smp_report ${ARGN}
      Threads::Threads)
    smp_precompile_if_used(${name} ${sources})
    install(TARGETS ${name})
  endforeach()
endfunction()

# smp_bench(FOLDER): one program per source file, FOLDER/x.cpp -> bench_x, made
# by who wants it.
function(smp_bench folder)
  smp_wanted(wanted runtime)
  if(NOT wanted)
    return()
  endif()
  add_custom_target(benchmarks)
  smp_sources(sources ${folder})
  foreach(source IN LISTS sources)
    cmake_path(GET source STEM name)
    add_executable(bench_${name} EXCLUDE_FROM_ALL ${source})
    target_link_libraries(bench_${name} PRIVATE smp::smp Threads::Threads)
    smp_precompile(bench_${name})
    add_dependencies(benchmarks bench_${name})
  endforeach()
endfunction()

# smp_examples(FOLDER): one program per source file, named after it, or for
# plugin_x.cpp a library that smp-train loads. It sees what a user's program
# sees, so an example that builds here builds there.
# Subfolders are projects of their own.
function(smp_examples folder)
  smp_wanted(wanted runtime)
  if(NOT wanted)
    return()
  endif()
  smp_sources(sources ${folder})
  list(FILTER sources INCLUDE REGEX "/${folder}/[^/]*$")
  foreach(source IN LISTS sources)
    cmake_path(GET source STEM name)
    if(name MATCHES "^plugin_")
      add_library(${name} MODULE ${source})
    else()
      add_executable(${name} ${source})
    endif()
    target_link_libraries(${name} PRIVATE smp::smp)
    smp_precompile(${name})
  endforeach()
endfunction()
