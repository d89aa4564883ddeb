#include "tests/support/catch.hpp"

#include "runtime/model/partition_notes.hpp"

#include <string>
#include <vector>

// What the partition print says of modules, in short and with all names.

using namespace smp;

TEST_CASE(
  "modules of which the same is said stand in one line, in short or all",
  "[runtime][session]") {
  using lines = std::vector<std::string>;
  partition_notes x;
  for (std::string name : {"a", "b", "c"})
    x.add("shared", name);
  x.add("not shared", "d", true); // a detail
  x.add("of the model");
  x.add("cut", "e");
  CHECK(x.lines() == lines{"shared: a, b, c", "of the model", "cut: e"});
  for (std::string name : {"f", "g"})
    x.add("shared", name);
  x.add("not shared", "h", true);
  CHECK(x.lines()
        == lines{"shared: a, b, c and 2 more", "of the model", "cut: e"});
  CHECK(x.lines(true)
        == lines{"shared: a, b, c, f, g", "not shared: d, h", "of the model",
                 "cut: e"});
}
