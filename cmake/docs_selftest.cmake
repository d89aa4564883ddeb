# Plants wrong rules, paths, links and imports one at a time and expects docs.cmake to
# find each.
#
#   cmake -D WORK=<scratch folder> -P docs_selftest.cmake

cmake_minimum_required(VERSION 3.25)

set(rule "**R1. It holds.** Because. Test: `tests/a_test.cpp`.")

include(${CMAKE_CURRENT_LIST_DIR}/selftest.cmake)

# A small tree that is right, with TEXT in FILE.
macro(plant_text file text)
  plant(actors/README.md "# actors\n" tests/README.md "# tests\n"
    docs/internals/rules.md "# Rules\n\n${rule}\n" tests/a_test.cpp "// R1\n"
    ${file} "${text}\n")
endmacro()

function(expect_wrong file text message)
  plant_text(${file} "${text}")
  cmake_path(GET file PARENT_PATH folder)
  expect_refusal(docs "(${file}|${folder}): [^\n]*${message}")
endfunction()

function(expect_right file text)
  plant_text(${file} "${text}")
  expect_pass(docs)
endfunction()

# Rules.
expect_wrong(actors/a.hpp "/// Is held [x; (R1, R2)." "R2 is not in")
expect_wrong(tests/a_test.cpp "TEST_CASE(\"a\", \"[a][R3]\") {" "R3 is not in")
expect_wrong(docs/a.md "See R4." "R4 is not in")
expect_wrong(docs/internals/rules.md "${rule}\n\n**R2. It holds.** Because." "R2 names no test")
expect_wrong(docs/internals/rules.md "${rule}\n\n${rule}" "R1 stands there twice")
expect_wrong(docs/internals/rules.md "**R1. It holds.** Test: `tests/b_test.cpp`." "no tests/b_test.cpp")
plant_text(tests/a_test.cpp "TEST_CASE(\"a\") {")
expect_refusal(docs "docs/internals/rules.md: no test cites R1")

# Paths and links.
expect_wrong(README.md "Start with `runtime/b.hpp`." "no runtime/b.hpp")
expect_wrong(README.md "In `runtime/` it is." "no runtime")
expect_wrong(tests/README.md "Start with `b_test.cpp`." "no b_test.cpp")
expect_wrong(README.md "[a] and [that](docs/b.md)" "docs/b.md leads nowhere")
expect_wrong(docs/a.md "[that](b.md#how)" "b.md leads nowhere")
expect_wrong(actors/a.hpp "  // see runtime/b.hpp" "no runtime/b.hpp")
expect_wrong(actors/a.hpp "// compared elsewhere (b_test.cpp)" "no b_test.cpp")
expect_right(actors/a.hpp "// compared elsewhere (a_test.cpp)")
expect_wrong(actors/a.hpp "throw error{\"see docs/b.md\"}\;" "no docs/b.md")
expect_wrong(docs/a.md "First `b::run`." "b::run is not in the code")

# Stops.
set(header "| where | stops | |\n| --- | --- | --- |\n")
set(table "${header}| here | takes it, `b::run` | 2 |\n| there | `c` | 1 |\n")
macro(plant_stops text)
  plant(docs/a.md "${text}\n" actors/README.md "# actors\n"
    actors/b.hpp "struct b {\n  void run(int x) const {\n"
    actors/b.cpp "int c(\n  int x) {\n  return d(x)\;\n")
endmacro()
function(expect_wrong_stops text message)
  plant_stops("${text}")
  expect_refusal(docs "docs/a.md: [^\n]*${message}")
endfunction()
plant_stops("${table}\n${header}| here | `c` | 1 |\n\n| stops | 3 | 1 |")
expect_pass(docs)
expect_wrong_stops("${table}\n| stops | 4 |" "3 stops are said to be 4")
expect_wrong_stops("${table}| then | `c` | 2 |" "a row of 1 stops says 2")
expect_wrong_stops("${header}| here | `b::c` | 1 |\n\n| stops | 1 |" "`b::c` is not defined")
expect_wrong_stops("${header}| here | `d` | 1 |\n\n| stops | 1 |" "`d` is not defined")

# Imports.
expect_wrong(tests/zoo/models/published.py "from published import X" "no module published")
expect_wrong(tests/zoo/rows.py "import torch\nimport rows.entry" "no module rows.entry")
expect_right(tests/zoo/rows.py "import torch\nfrom rows import X")
expect_right(tests/zoo/models/published.py "from models.published import (\n  X)")

# Folders.
expect_wrong(runtime/base/a.hpp "int x" "has no README.md")
expect_wrong(include/smp/a.hpp "int x" "has no README.md")
expect_wrong(cmake/a.cmake "set(x)" "has no README.md")
expect_wrong(tests/support/a.hpp "int x" "has no README.md")
expect_right(tests/runtime/base/b_test.cpp "int x")

# What is right must pass, or the rules above prove nothing.
expect_right(actors/a.hpp "/// Holds (R1).\n// see tests/a_test.cpp and actors/a.hpp")
expect_right(actors/a.hpp "auto R2D = 1; // FOR3, xR7")
expect_right(README.md "[rules](docs/internals/rules.md) and `tests/*_test.cpp`, `RUN_DIR/x.json`")
expect_right(README.md "```\ncat `runtime/b.hpp` [a](docs/b.md)\n```\n[b](https://x.org/y)")
expect_right(tests/README.md "Start with `a_test.cpp`.")
expect_right(actors/a.hpp "struct b { void run(); }; // see `b::run`")

file(REMOVE_RECURSE ${WORK})
