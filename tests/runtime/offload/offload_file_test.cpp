#include "tests/support/catch.hpp"

#include "runtime/offload/offload_file.hpp"
#include "tests/support/error_of.hpp"
#include "tests/support/scratch_dir.hpp"

#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <numeric>
#include <vector>

using namespace smp;
using namespace smp::test;

using Catch::Matchers::ContainsSubstring;

TEST_CASE("a file without a name gives back what it got", "[R57]") {
  scratch_dir dir;
  auto file = open_offload_file(dir.path);
  CHECK(std::filesystem::is_empty(dir.path));
  std::vector<int> x(100'000), y(x.size());
  std::iota(x.begin(), x.end(), 1);
  auto bytes = x.size() * sizeof(int);
  CHECK(file->reserve(0, 1 << 20) == 0);
  CHECK(file->write(x.data(), bytes, 8192) == 0);
  CHECK(file->read(y.data(), bytes, 8192) == 0);
  CHECK(x == y);
  CHECK(std::filesystem::is_empty(dir.path));
}

TEST_CASE("bytes that the file does not have are an error", "[R57]") {
  scratch_dir dir;
  auto file = open_offload_file(dir.path);
  char x[16] = {};
  CHECK(file->write(x, 16, 0) == 0);
  CHECK(file->read(x, 16, 8) == EIO);
}

TEST_CASE("a folder that is not there is named", "[R57]") {
  scratch_dir dir;
  auto missing = (dir.path / "nowhere").string();
  auto text = error_of([&] { open_offload_file(missing); }, error_code::config);
  CHECK_THAT(text, ContainsSubstring("'" + missing + "'")
                     && ContainsSubstring("No such file or directory")
                     && ContainsSubstring("smp.offload_dir"));
}

TEST_CASE("a tmpfs is known to be memory", "[R57]") {
  CHECK(is_in_memory("/dev/shm"));
  CHECK(!is_in_memory("/proc"));
  CHECK(!is_in_memory("/nowhere"));
}

TEST_CASE("temporary files are where the environment says", "[R57]") {
  std::string before = std::getenv("TMPDIR") ? std::getenv("TMPDIR") : "";
  ::setenv("TMPDIR", "/somewhere", 1);
  CHECK(default_offload_dir() == "/somewhere");
  ::unsetenv("TMPDIR");
  CHECK(default_offload_dir() == "/var/tmp");
  if (!before.empty())
    ::setenv("TMPDIR", before.c_str(), 1);
}
