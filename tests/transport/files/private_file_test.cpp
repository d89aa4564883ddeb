#include "tests/support/catch.hpp"

#include "tests/support/error_of.hpp"
#include "tests/support/scratch_dir.hpp"
#include "transport/files/private_file.hpp"

#include <cerrno>
#include <filesystem>

#include <sys/stat.h>

using namespace smp;
using Catch::Matchers::ContainsSubstring;

TEST_CASE("A private file is its user's alone and whole", "[transport][R44]") {
  smp::test::scratch_dir dir;
  auto path = (dir.path / "secret").string();
  CHECK_FALSE(read_private_file(path));
  CHECK(errno == ENOENT);
  REQUIRE(write_private_file(path, "one") == 0);
  REQUIRE(write_private_file(path, "another") == 0);
  CHECK(read_private_file(path) == "another");
  struct stat info {};
  REQUIRE(::stat(path.c_str(), &info) == 0);
  CHECK((info.st_mode & 0777) == 0600);
  for (auto& file : std::filesystem::directory_iterator{dir.path})
    CHECK(file.path() == path); // no draft stays
  for (auto mode : {0640, 0604, 0620}) {
    REQUIRE(::chmod(path.c_str(), static_cast<mode_t>(mode)) == 0);
    CHECK_THAT(
      smp::test::error_of([&] { read_private_file(path); }, error_code::config),
      ContainsSubstring("mode 0600"));
  }
  // To open a pipe would wait for somebody who writes to it.
  std::filesystem::remove(path);
  REQUIRE(::mkfifo(path.c_str(), 0600) == 0);
  CHECK_THAT(
    smp::test::error_of([&] { read_private_file(path); }, error_code::config),
    ContainsSubstring("must be a file"));
}

TEST_CASE("A private file that cannot be written says why", "[transport]") {
  smp::test::scratch_dir dir;
  CHECK(write_private_file(dir.path / "none" / "secret", "x") == ENOENT);
}
