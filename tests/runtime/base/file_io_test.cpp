#include "tests/support/catch.hpp"

#include "runtime/base/file_io.hpp"
#include "tests/support/scratch_dir.hpp"
#include "transport/error.hpp"

#include <cerrno>

using namespace smp;
using namespace std::string_literals;
using Catch::Matchers::ContainsSubstring;
using test::scratch_dir;

TEST_CASE("a file is read whole, or as far as asked", "[runtime]") {
  scratch_dir dir;
  auto text = "one\0two\n"s + std::string(200'000, 'x');
  auto path = dir.write("text", text);
  CHECK(read_text(path) == text);
  CHECK(try_read(path) == text);
  CHECK(try_read(path, 5) == "one\0t"s);
  CHECK(try_read(path, 0) == "");
  CHECK(try_read(path, text.size()) == text);
}

TEST_CASE("a file that does not know its size is read whole", "[runtime]") {
  CHECK_THAT(read_text("/proc/self/status"), ContainsSubstring("VmRSS"));
}

TEST_CASE("what cannot be read is named", "[runtime]") {
  scratch_dir dir;
  std::string missing = dir.path / "missing";
  CHECK_FALSE(try_read(missing));
  CHECK(errno == ENOENT);
  CHECK_FALSE(try_read(dir.path));
  CHECK(errno == EISDIR);
  CHECK_THROWS_WITH(read_text(missing),
                    ContainsSubstring("cannot read " + missing + ": ")
                      && ContainsSubstring("No such file"));
  CHECK_THROWS_WITH(read_text(dir.path),
                    ContainsSubstring("it is a directory"));
}
