# Plants what is too long and what just fits, and expects sizes.cmake to tell
# them apart.
#
#   cmake -D WORK=<scratch folder> -P sizes_selftest.cmake

cmake_minimum_required(VERSION 3.25)

include(${CMAKE_CURRENT_LIST_DIR}/selftest.cmake)

function(expect_wrong file text complaint)
  plant(${file} "${text}")
  expect_refusal(sizes "${file}:${complaint}")
endfunction()

function(expect_right file text)
  plant(${file} "${text}")
  expect_pass(sizes)
endfunction()

string(REPEAT "  f()\;\n" 58 body)
set(function "int f(int a,\n      int b) {\n")
expect_wrong(runtime/a.cpp "${function}${body}}\n" "1: a function of 61 lines")
expect_wrong(runtime/a.cpp "\nstruct s : t {\n  s() : t(1) {\n    nop()\;\n  }\n${function}${body}}\n}\;\n"
  "6: a function of 61 lines")
expect_wrong(bench/a.cpp "auto f = [] (int x) {\n${body}\n}\;\n" "1: a function of 61 lines")
expect_wrong(bench/a.cpp "int f() {\n  g(\"}\", R\"(\n}})\", '}')\; // }\n${body}}\n" "1: a function of 62 lines")
expect_wrong(bench/a.cpp "template <template <template <class> class> class A,\n          class B = c<int>>\nint f(int x) {\n${body}}\n"
  "1: a function of 62 lines")
expect_right(bench/a.cpp "template <template <class> class A>\nclass b : c<decltype(d())> {\n${body}${body}};\n")
expect_wrong(bench/a.cpp "a::a(int x)\n  : b(1), c_{x}, d_{{1, 2}, [] { f(); }} {\n${body}}\n" "1: a function of 61 lines")
expect_right(bench/a.cpp "a::a(int x) : c_{x} {\n  f();\n}\n\nconst e f = g(h{\n${body}${body}});\n\nstruct i : j<decltype(k{})> {\n${body}${body}};\n")
expect_right(runtime/a.cpp "int f() {\n${body}}\n\nnamespace a {\n${function}}\n}\n")
expect_right(runtime/a.cpp "class c : d<decltype(e())> {\n${body}${body}}\;\n")
expect_right(runtime/a.cpp "const a b = {\n${body}${body}}\;\n")
expect_wrong(tests/a.cpp "${function}${body}}\n" "1: a function of 61 lines")
expect_right(tests/a.cpp "#define ALL(x) \\\n  f(x); \\\n  g(x)\n\nnamespace {\n${body}${body}}\n")

string(REPEAT "int i\;\n" 600 lines)
expect_right(tests/a.hpp "${lines}")
expect_wrong(tests/a.hpp "${lines}\n" "601: a file of 601 lines")

expect_wrong(tests/zoo/a.py "${lines}\n" "601: a file of 601 lines")

string(REPEAT "ä" 77 wide)
expect_right(tests/a.hpp "// ${wide}\n")
expect_wrong(tests/a.hpp "\n// ${wide}ä\n" "2: a line of 81 columns")

# Of a script only the length counts.
expect_right(tests/zoo/a.py "${function}${body}}\n# ${wide}${wide}\n")

# A tree without sources is a wrong ROOT.
plant(README.md "nothing")
expect_refusal(sizes "no source of smp")

file(REMOVE_RECURSE ${WORK})
