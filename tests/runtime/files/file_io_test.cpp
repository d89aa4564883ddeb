#include "tests/support/catch.hpp"

#include "runtime/files/file_io.hpp"
#include "tests/support/scratch_dir.hpp"
#include "transport/error.hpp"

#include <cerrno>
#include <filesystem>
#include <set>
#include <string>

#include <sys/stat.h>
#include <unistd.h>

using namespace smp;
using namespace std::string_literals;
using Catch::Matchers::ContainsSubstring;
using test::scratch_dir;

TEST_CASE("a file is read whole, or as far as asked", "[runtime]") {
  scratch_dir dir;
  auto text = "one\0two\n"s;
  text.append(200'000, 'x');
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

TEST_CASE("a pipe to which nobody writes is empty", "[runtime]") {
  scratch_dir dir;
  auto path = (dir.path / "pipe").string();
  REQUIRE(::mkfifo(path.c_str(), 0600) == 0);
  CHECK(try_read(path) == "");
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

TEST_CASE("what writers left half written is removed, and nothing else",
          "[runtime]") {
  scratch_dir dir;
  auto left = [&] {
    std::set<std::string> result;
    for (auto& x : std::filesystem::directory_iterator{dir.path})
      result.insert(x.path().filename().string());
    return result;
  };
  std::set<std::string> others{"model.safetensors", "x.partial-",
                               "x.partial-1",       "x.partial-1-2x",
                               "x.partial-a-1",     "partial-1-2"};
  for (auto& x : others)
    dir.write(x, "text");
  std::filesystem::create_directory(dir.path / "folder.partial-1-2");
  others.insert("folder.partial-1-2");
  dir.write("model.safetensors.partial-12-0", "text");
  dir.write("x.partial-y.partial-13-7", "text");
  remove_leftovers(dir.path, 13);
  CHECK(left().contains("model.safetensors.partial-12-0"));
  CHECK_FALSE(left().contains("x.partial-y.partial-13-7"));
  remove_leftovers(dir.path);
  CHECK(left() == others);
  remove_leftovers(dir.path / "nowhere");
}

TEST_CASE("a file that is being replaced is named so that it can be found",
          "[runtime]") {
  scratch_dir dir;
  auto path = (dir.path / "model").string();
  file_errors e{"write", path};
  replacement x{path, e};
  x.write("text", 4);
  CHECK_FALSE(std::filesystem::is_empty(dir.path));
  remove_leftovers(dir.path, ::getpid() + 1);
  CHECK_FALSE(std::filesystem::is_empty(dir.path));
  remove_leftovers(dir.path, ::getpid());
  CHECK(std::filesystem::is_empty(dir.path));
}
