# The layering test: reads every #include and fails on one that points the
# wrong way.
#
#   cmake -D ROOT=<tree> -P layering.cmake
#
# apps -> runtime -> {actors, tp, partition} -> transport

cmake_minimum_required(VERSION 3.25)

# -- the rules -----------------------------------------------------------------

set(folders transport partition tp actors runtime apps)

# What everybody shares: the headers in transport's root that move no bytes.
set(vocabulary "transport/(error|ids|inspect|bytes|clock|tensor_ref|wait|waiter|device_ops|build_id)\\.hpp")

# Per folder, the project headers that may be included (regular expressions).
set(allowed_transport "transport/")
set(allowed_partition "partition/" "${vocabulary}")
set(allowed_tp "tp/" "transport/")
set(allowed_actors "actors/" "partition/" "transport/")
set(allowed_runtime "runtime/" "actors/" "tp/" "partition/" "transport/")
set(allowed_apps "apps/" "runtime/" "${vocabulary}" "actors/client\\.hpp")

# Third-party headers that belong to some places only: what it is called, how
# its headers are known, and the files that may include them.
set(third_parties caf ucx torch)
set(name_caf CAF)
set(headers_caf "caf/")
set(places_caf "actors/")
set(name_ucx UCX)
set(headers_ucx "uc[mpst]/")
set(places_ucx "transport/ucx/")
set(name_torch Torch)
set(headers_torch "torch/|ATen/|c10/")
set(places_torch "tp/|runtime/|apps/")

# Costs 18 s in every file that includes it.
set(slow_headers "torch/(torch|all|extension)\\.h")

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
  file(STRINGS ${ROOT}/${file} lines REGEX "^[ \t]*#[ \t]*include")
  foreach(line IN LISTS lines)
    if(line MATCHES "^[ \t]*#[ \t]*include[ \t]*([<\"])([^>\"]*)[>\"]")
      set(bracket "${CMAKE_MATCH_1}")
      set(header "${CMAKE_MATCH_2}")
      string(REGEX REPLACE "/.*" "" target "${header}")
      if(bracket STREQUAL "\"" OR target IN_LIST folders)
        check_project_header(${folder} ${file} "${line}" "${header}")
      endif()
      check_third_party(${file} "${line}" "${header}")
    endif()
  endforeach()
  set(errors "${errors}" PARENT_SCOPE)
endfunction()

set(count 0)
foreach(folder IN LISTS folders)
  file(GLOB_RECURSE files RELATIVE ${ROOT} ${ROOT}/${folder}/*.hpp ${ROOT}/${folder}/*.cpp)
  foreach(file IN LISTS files)
    check_file(${folder} ${file})
    math(EXPR count "${count} + 1")
  endforeach()
endforeach()

foreach(error IN LISTS errors)
  message(NOTICE "${error}")
endforeach()
if(errors)
  list(LENGTH errors number)
  message(FATAL_ERROR "layering: ${number} wrong includes in ${count} files")
endif()
message(STATUS "layering: ${count} files, all includes point the right way")
