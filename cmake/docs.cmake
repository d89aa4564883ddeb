# The test of texts: a rule that is cited stands in docs/rules.md, and a path
# that a page or a comment names exists.
#
#   cmake -D ROOT=<tree> -P docs.cmake

cmake_minimum_required(VERSION 3.25)

set(folders actors apps bench cmake config docs examples partition runtime tests tp transport)
list(JOIN folders "|" any_folder)

set(errors "")

function(complain file text)
  set(errors "${errors};${file}: ${text}" PARENT_SCOPE)
endfunction()

# -- files ---------------------------------------------------------------------

file(GLOB pages RELATIVE ${ROOT} ${ROOT}/*.md)
set(sources "")
foreach(folder IN LISTS folders)
  file(GLOB_RECURSE found RELATIVE ${ROOT} ${ROOT}/${folder}/*.md)
  list(APPEND pages ${found})
  file(GLOB_RECURSE found RELATIVE ${ROOT} ${ROOT}/${folder}/*.hpp ${ROOT}/${folder}/*.cpp)
  list(APPEND sources ${found})
endforeach()
# They say of made-up files what to do with them.
list(FILTER sources EXCLUDE REGEX "^tests/data/")

# -- rules ---------------------------------------------------------------------
# A paragraph of docs/rules.md: **R7. What holds.** Why. Test: `tests/...`.

set(rules "")
if(EXISTS ${ROOT}/docs/rules.md)
  file(READ ${ROOT}/docs/rules.md text)
  # Of lists with brackets and semicolons CMake makes others.
  string(REGEX REPLACE "[][;]" " " text "${text}")
  string(REPLACE "\n\n" ";" paragraphs "${text}")
  foreach(paragraph IN LISTS paragraphs)
    if(paragraph MATCHES "^[*][*](R[0-9]+)[.]")
      set(rule ${CMAKE_MATCH_1})
      if(rule IN_LIST rules)
        complain(docs/rules.md "${rule} stands there twice")
      endif()
      list(APPEND rules ${rule})
      if(NOT paragraph MATCHES "Test:[ \n]`tests/")
        complain(docs/rules.md "${rule} names no test")
      endif()
    endif()
  endforeach()
endif()

function(check_rules file)
  file(STRINGS ${ROOT}/${file} text REGEX "R[0-9]")
  # Between two spaces each, as a match takes both.
  string(REGEX REPLACE "[^A-Za-z0-9_]+" "  " text " ${text} ")
  string(REGEX MATCHALL " R[0-9]+ " cited "${text}")
  list(REMOVE_DUPLICATES cited)
  foreach(rule IN LISTS cited)
    string(STRIP "${rule}" rule)
    if(NOT rule IN_LIST rules)
      complain(${file} "${rule} is not in docs/rules.md")
    endif()
  endforeach()
  set(errors "${errors}" PARENT_SCOPE)
endfunction()

# -- paths ---------------------------------------------------------------------

# A path may be a pattern, and start in the folder in which it is named; a bare
# name may be of any file below that folder.
function(check_path file path)
  cmake_path(GET file PARENT_PATH folder)
  string(REGEX REPLACE "/$" "" path ${path})
  file(GLOB found ${ROOT}/${path} ${ROOT}/${folder}/${path})
  if(NOT found AND folder AND NOT path MATCHES "/")
    file(GLOB_RECURSE found ${ROOT}/${folder}/${path})
  endif()
  if(NOT found)
    complain(${file} "there is no ${path}")
  endif()
  set(errors "${errors}" PARENT_SCOPE)
endfunction()

# What is in `backticks` and looks like a file of ours, and relative links.
function(check_paths_of_page file)
  file(READ ${ROOT}/${file} text)
  string(REGEX REPLACE "[][;]" "@" text "${text}")
  # Every second part is a block of code.
  string(REPLACE "```" ";" parts "${text}")
  set(text "")
  set(prose TRUE)
  foreach(part IN LISTS parts)
    if(prose)
      string(APPEND text "${part}")
      set(prose FALSE)
    else()
      set(prose TRUE)
    endif()
  endforeach()
  string(REGEX MATCHALL "`[A-Za-z0-9_./*-]+`" names "${text}")
  foreach(name IN LISTS names)
    string(REPLACE "`" "" name "${name}")
    if(name MATCHES "^(${any_folder})/[^A-Z]*$" OR name MATCHES "[.](hpp|cpp|cmake|md|py)$")
      check_path(${file} ${name})
    endif()
  endforeach()
  cmake_path(GET file PARENT_PATH folder)
  string(REGEX MATCHALL "@[(][A-Za-z0-9_./-]+[#)]" links "${text}")
  foreach(link IN LISTS links)
    string(REGEX REPLACE "[@()#]" "" link "${link}")
    if(NOT EXISTS ${ROOT}/${folder}/${link})
      complain(${file} "the link ${link} leads nowhere")
    endif()
  endforeach()
  set(errors "${errors}" PARENT_SCOPE)
endfunction()

# In comments, and pages that error texts name.
function(check_paths_of_source file)
  file(STRINGS ${ROOT}/${file} text REGEX "//.*/.*[.]|docs/")
  string(REGEX REPLACE "[][;]" " " text "${text}")
  string(REGEX MATCHALL "[A-Za-z0-9_./*-]+[.](hpp|cpp|cmake|md|py)" names "${text}")
  foreach(name IN LISTS names)
    if(name MATCHES "^(${any_folder})/")
      check_path(${file} ${name})
    endif()
  endforeach()
  set(errors "${errors}" PARENT_SCOPE)
endfunction()

# -- the check -----------------------------------------------------------------

# Every folder says what lives there.
file(GLOB subfolders LIST_DIRECTORIES true RELATIVE ${ROOT} ${ROOT}/runtime/*)
foreach(folder IN LISTS folders subfolders)
  file(GLOB found ${ROOT}/${folder}/*.hpp ${ROOT}/${folder}/*.cpp)
  if(found AND NOT EXISTS ${ROOT}/${folder}/README.md)
    complain(${folder} "has no README.md")
  endif()
endforeach()
foreach(file IN LISTS pages)
  check_paths_of_page(${file})
endforeach()
foreach(file IN LISTS sources)
  check_paths_of_source(${file})
endforeach()
foreach(file IN LISTS pages sources)
  if(NOT file STREQUAL "docs/rules.md")
    check_rules(${file})
  endif()
endforeach()
foreach(file cmake/tests.cmake dev)
  if(EXISTS ${ROOT}/${file})
    check_rules(${file})
  endif()
endforeach()

list(REMOVE_ITEM errors "")
foreach(error IN LISTS errors)
  message(NOTICE "${error}")
endforeach()
if(errors)
  list(LENGTH errors number)
  message(FATAL_ERROR "docs: ${number} wrong rules, paths or links")
endif()
list(LENGTH rules number)
message(STATUS "docs: every rule, path and link is there, ${number} rules")
