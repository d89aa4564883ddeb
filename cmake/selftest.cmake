# What the tests of layering, sizes and docs share: each plants one thing at a
# time into a tree at WORK and looks at what the check NAME.cmake says of it.

# plant(FILE TEXT [FILE TEXT]...): a tree with nothing but these files; where a
# file stands twice, its last text counts.
function(plant)
  file(REMOVE_RECURSE ${WORK})
  math(EXPR last "${ARGC} - 1")
  foreach(i RANGE 1 ${last} 2)
    math(EXPR file "${i} - 1")
    file(WRITE ${WORK}/${ARGV${file}} "${ARGV${i}}")
    set(planted "${ARGV${file}}: ${ARGV${i}}")
  endforeach()
  set(planted "${planted}" PARENT_SCOPE)
endfunction()

# run(RESULT OUTPUT NAME): checks the planted tree.
function(run result output name)
  execute_process(
    COMMAND ${CMAKE_COMMAND} -D ROOT=${WORK}
      -P ${CMAKE_CURRENT_FUNCTION_LIST_DIR}/${name}.cmake
    RESULT_VARIABLE status OUTPUT_VARIABLE out ERROR_VARIABLE out)
  set(${result} ${status} PARENT_SCOPE)
  set(${output} "${out}" PARENT_SCOPE)
endfunction()

# expect_refusal(NAME PATTERN): the check must fail and say PATTERN.
function(expect_refusal name pattern)
  run(status out ${name})
  if(status EQUAL 0 OR NOT out MATCHES "${pattern}")
    message(SEND_ERROR "not found: ${pattern}\nplanted ${planted}\n${out}")
  endif()
endfunction()

# expect_pass(NAME): the check must find nothing.
function(expect_pass name)
  run(status out ${name})
  if(NOT status EQUAL 0)
    message(SEND_ERROR "wrongly refused\nplanted ${planted}\n${out}")
  endif()
endfunction()
