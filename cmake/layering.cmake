# The layering test: reads every #include and fails on one that points the
# wrong way, on units that include each other, and on a folder that is too large.
#
#   cmake -D ROOT=<tree> -P layering.cmake
#
# {apps, python} -> include -> runtime -> {actors, tp, partition} -> transport
#
# and inside runtime/ and actors/ from one subfolder to those below it.

cmake_minimum_required(VERSION 3.25)

# -- the rules -----------------------------------------------------------------

# (What lies in include/ is included as "smp/...".)
set(folders transport partition tp actors runtime include smp apps python)

# What everybody shares: the headers in transport's root that move no bytes.
set(vocabulary "transport/(error|ids|inspect|bytes|clock|tensor_ref|wait|waiter|device_ops|build_id)\\.hpp")

# Per folder, the project headers that may be included (regular expressions).
set(allowed_transport "transport/")
set(allowed_partition "partition/" "${vocabulary}")
set(allowed_tp "tp/" "transport/")
set(allowed_actors "actors/" "partition/" "transport/")
set(allowed_runtime "runtime/" "tp/" "partition/" "transport/"
  # Of the actors: what a rank is made of, what a request and a schedule are,
  # what is kept of a step, and what others see of a rank.
  "actors/[a-z]*/(node|executor|execution_token|microbatch_sequencer)\\.hpp"
  "actors/[a-z]*/(request|request_number|result_name|user_schedule)\\.hpp"
  "actors/[a-z]*/(order_book|computed_order|step_flow)\\.hpp"
  "actors/[a-z]*/(rank_board|call_slot|comm_fabric|message_priority)\\.hpp"
  "actors/[a-z]*/(membership|supervisor_link)\\.hpp"
  "actors/[a-z]*/(stalls|stall_judge|rank_view|entry_file|node_status)\\.hpp"
  "actors/[a-z]*/run_status\\.hpp"
  # What is made of the events of ranks.
  "actors/flight/")
set(allowed_include "smp/" "${vocabulary}" "runtime/" "tp/(cross_entropy|functions)\\.hpp" "actors/schedule/schedule_actor\\.hpp")
set(allowed_apps "apps/" "smp/" "runtime/" "${vocabulary}"
  "transport/network/addresses\\.hpp")
# The Python package; pybind11 is in LibTorch's headers.
set(allowed_python "python/" "smp/schedule_actor\\.hpp" "tp/functions\\.hpp" "runtime/" "${vocabulary}"
  "transport/stacks/script_probe\\.hpp")
# Programs that look at runs start at once, without LibTorch.
set(viewers "apps/(report|web|smp-inspect|smp-top)/")
set(allowed_viewers "${viewers}" "${vocabulary}" "actors/client\\.hpp"
  "actors/flight/" "transport/files/run_secret\\.hpp" "transport/network/addresses\\.hpp"
  "partition/short_type\\.hpp")

# The subfolders, bottom to top: each may include itself and those before it.
# ("client" is not a subfolder: all of it is for those who look from outside.)
set(order_actors flight protocol board comm order schedule server inspection
  stalls cluster host client)
set(order_runtime files base device offload values deferred lazy config process launch
  model sharing execution calls intercept collectives optimizer placement replicas
  step session checkpoint nn data train plan verify)

# A unit is a header with its source. Units that include each other are read,
# built and tested together: few, and in one folder.
set(units_of_a_cycle 4)

# A folder with more files than this has no order that a reader could see.
set(files_in_a_folder 30)

# Third-party headers that belong to some places only: what it is called, how
# its headers are known, and the files that may include them.
set(third_parties caf ucx torch ncurses beast)
set(name_caf CAF)
set(headers_caf "caf/")
set(places_caf "actors/")
set(name_ucx UCX)
set(headers_ucx "uc[mpst]/")
set(places_ucx "transport/ucx/")
set(name_torch Torch)
set(headers_torch "torch/|ATen/|c10/")
set(places_torch "tp/|runtime/|apps/smp-train/|python/")
set(name_ncurses ncurses)
set(headers_ncurses "n?cursesw?[./]")
set(places_ncurses "apps/smp-top/")
set(name_beast Beast)
set(headers_beast "boost/beast")
set(places_beast "apps/web/http_server\\.cpp")

# Costs 18 s in every file that includes it.
set(slow_headers "torch/(torch|all|extension)\\.h")

# What smp.hpp and the like may bring along of Torch: tensors, which take 2 s,
# and what is nothing beside them. Who has modules includes those anyway.
set(quick_headers "c10/" "ATen/core/(Tensor|MT19937RNGEngine)\\.h"
  "torch/(ordered_dict\\.h|headeronly/)")

# What smp.hpp and the like must not bring along, or it is installed, too.
set(private_headers "runtime/calls/messages\\.hpp" "runtime/config/config_file\\.hpp"
  "runtime/optimizer/(host_weights|loss_scaler|master_weights)\\.hpp"
  "runtime/optimizer/(optimizer_shards|weight_average)\\.hpp"
  "transport/collectives/collectives\\.hpp")

# -- the check -----------------------------------------------------------------

set(errors "")

function(complain file line text)
  list(APPEND errors "${file}: ${text}: ${line}")
  set(errors "${errors}" PARENT_SCOPE)
endfunction()

# Sets RESULT to whether HEADER starts with one of the expressions.
function(matches_any result header)
  set(${result} FALSE PARENT_SCOPE)
  foreach(expression IN LISTS ARGN)
    if(header MATCHES "^(${expression})")
      set(${result} TRUE PARENT_SCOPE)
    endif()
  endforeach()
endfunction()

function(check_project_header folder file line header)
  string(REGEX REPLACE "/.*" "" target "${header}")
  if(file MATCHES "^${viewers}")
    set(folder viewers)
  endif()
  if(NOT target IN_LIST folders)
    complain(${file} "${line}" "not a path from the repository's root")
  else()
    matches_any(ok "${header}" ${allowed_${folder}})
    if(NOT ok)
      complain(${file} "${line}" "${folder}/ must not include this")
    endif()
  endif()
  set(errors "${errors}" PARENT_SCOPE)
endfunction()

# Sets RESULT to where FILE's subfolder stands in the order of FOLDER.
function(place_of result folder file)
  set(subfolder "")
  if(file MATCHES "^[^/]*/client[.]")
    set(subfolder client)
  elseif(file MATCHES "^[^/]*/([^/]*)/")
    set(subfolder ${CMAKE_MATCH_1})
  endif()
  list(FIND order_${folder} "${subfolder}" place)
  set(${result} ${place} PARENT_SCOPE)
endfunction()

function(check_subfolders folder file line header)
  if(NOT DEFINED order_${folder} OR NOT header MATCHES "^${folder}/")
    return()
  endif()
  place_of(from ${folder} ${file})
  place_of(to ${folder} ${header})
  if(to EQUAL -1)
    complain(${file} "${line}" "a place unknown in ${folder}/")
  elseif(to GREATER from)
    complain(${file} "${line}" "points back to a subfolder above")
  endif()
  set(errors "${errors}" PARENT_SCOPE)
endfunction()

function(check_third_party file line header)
  foreach(party IN LISTS third_parties)
    if(header MATCHES "^(${headers_${party}})" AND NOT file MATCHES "^(${places_${party}})")
      complain(${file} "${line}" "a ${name_${party}} header has no place here")
    endif()
  endforeach()
  if(file MATCHES "\\.hpp$" AND header MATCHES "^(${slow_headers})$")
    complain(${file} "${line}" "too slow for a header")
  endif()
  set(errors "${errors}" PARENT_SCOPE)
endfunction()

function(check_file folder file)
  if(DEFINED order_${folder})
    place_of(place ${folder} ${file})
    if(place EQUAL -1)
      complain(${file} "name it in cmake/layering.cmake" "a place unknown in ${folder}/")
    endif()
  endif()
  file(STRINGS ${ROOT}/${file} lines REGEX "^[ \t]*#[ \t]*include")
  foreach(line IN LISTS lines)
    if(line MATCHES "^[ \t]*#[ \t]*include[ \t]*([<\"])([^>\"]*)[>\"]")
      set(bracket "${CMAKE_MATCH_1}")
      set(header "${CMAKE_MATCH_2}")
      string(REGEX REPLACE "/.*" "" target "${header}")
      if(bracket STREQUAL "\"" OR target IN_LIST folders)
        check_project_header(${folder} ${file} "${line}" "${header}")
        check_subfolders(${folder} ${file} "${line}" "${header}")
      endif()
      check_third_party(${file} "${line}" "${header}")
    endif()
  endforeach()
  set(errors "${errors}" PARENT_SCOPE)
endfunction()

# FILE is, or is included by, what users include.
function(check_for_users file)
  get_property(known GLOBAL PROPERTY smp_for_users)
  if("${file}" IN_LIST known)
    return()
  endif()
  set_property(GLOBAL APPEND PROPERTY smp_for_users "${file}")
  file(STRINGS ${ROOT}/${file} lines REGEX "^[ \t]*#[ \t]*include")
  foreach(line IN LISTS lines)
    if(NOT line MATCHES "^[ \t]*#[ \t]*include[ \t]*[<\"]([^>\"]*)[>\"]")
      continue()
    endif()
    set(header "${CMAKE_MATCH_1}")
    matches_any(quick "${header}" ${quick_headers})
    matches_any(private "${header}" ${private_headers})
    if(private)
      complain(${file} "${line}" "not for users")
    endif()
    if(EXISTS ${ROOT}/${header})
      check_for_users(${header})
    elseif(header MATCHES "^(${headers_torch})" AND NOT quick)
      complain(${file} "${line}" "too slow for what users include")
    endif()
  endforeach()
  set(errors "${errors}" PARENT_SCOPE)
endfunction()

# FILE is, or is included by, what those include who look from outside.
function(check_for_viewers file)
  get_property(known GLOBAL PROPERTY smp_for_viewers)
  if("${file}" IN_LIST known OR NOT EXISTS ${ROOT}/${file})
    return()
  endif()
  set_property(GLOBAL APPEND PROPERTY smp_for_viewers "${file}")
  file(STRINGS ${ROOT}/${file} lines REGEX "^[ \t]*#[ \t]*include")
  foreach(line IN LISTS lines)
    if(line MATCHES "^[ \t]*#[ \t]*include[ \t]*[<\"]([^>\"]*)[>\"]")
      set(header "${CMAKE_MATCH_1}")
      if(header MATCHES "^(${headers_caf})")
        complain(${file} "${line}" "CAF behind actors/client")
      endif()
      check_for_viewers(${header})
    endif()
  endforeach()
  set(errors "${errors}" PARENT_SCOPE)
endfunction()

check_for_viewers(actors/client.hpp)
check_for_viewers(actors/client.cpp)

file(GLOB public RELATIVE ${ROOT} ${ROOT}/include/smp/*.hpp)
# For those who have Torch's modules anyway.
list(REMOVE_ITEM public include/smp/nn.hpp)
foreach(header IN LISTS public)
  check_for_users(${header})
endforeach()

set(sources "")
foreach(folder IN LISTS folders)
  file(GLOB_RECURSE files RELATIVE ${ROOT} ${ROOT}/${folder}/*.hpp ${ROOT}/${folder}/*.cpp)
  list(APPEND sources ${files})
  foreach(file IN LISTS files)
    check_file(${folder} ${file})
  endforeach()
endforeach()
list(LENGTH sources count)

# Of tests, too, but for data.
file(GLOB_RECURSE counted RELATIVE ${ROOT} ${ROOT}/tests/*.hpp ${ROOT}/tests/*.cpp)
list(FILTER counted EXCLUDE REGEX "^tests/data/")
list(APPEND counted ${sources})
foreach(file IN LISTS counted)
  cmake_path(GET file PARENT_PATH place)
  string(MAKE_C_IDENTIFIER "${place}" name)
  if(NOT DEFINED files_${name})
    set(files_${name} 0)
    list(APPEND places ${place})
  endif()
  math(EXPR files_${name} "${files_${name}} + 1")
endforeach()
foreach(place IN LISTS places)
  string(MAKE_C_IDENTIFIER "${place}" name)
  if(files_${name} GREATER files_in_a_folder)
    list(APPEND errors
      "${place}: ${files_${name}} files (at most ${files_in_a_folder}): divide it by what they do")
  endif()
endforeach()

execute_process(
  COMMAND awk -v max_units=${units_of_a_cycle}
    -f ${CMAKE_CURRENT_LIST_DIR}/cycles.awk ${sources}
  WORKING_DIRECTORY ${ROOT} OUTPUT_VARIABLE cycles ERROR_VARIABLE trouble)
if(trouble)
  message(FATAL_ERROR "${trouble}")
endif()
string(REGEX MATCHALL "[^\n]+" cycles "${cycles}")
list(APPEND errors ${cycles})

foreach(error IN LISTS errors)
  message(NOTICE "${error}")
endforeach()
if(errors)
  list(LENGTH errors number)
  message(FATAL_ERROR "layering: ${number} wrong includes, cycles or folders in ${count} files")
endif()
message(STATUS "layering: ${count} files, all includes point the right way")
