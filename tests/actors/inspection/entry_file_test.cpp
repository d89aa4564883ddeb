#include "tests/support/catch.hpp"

#include "actors/inspection/entry_file.hpp"
#include "tests/support/error_of.hpp"
#include "tests/support/scratch_dir.hpp"
#include "transport/error.hpp"

#include <filesystem>
#include <optional>

#include <sys/stat.h>

using namespace smp;
using Catch::Matchers::ContainsSubstring;
using smp::test::error_of;

TEST_CASE("An entry is read as it was written, and goes with the run",
          "[actors][inspection]") {
  smp::test::scratch_dir dir;
  auto secret = run_secret::make();
  auto path = entry_path(dir.path);
  {
    published_entry file{dir.path, entry_of_this_process(4711, secret)};
    struct stat info {};
    REQUIRE(::stat(path.c_str(), &info) == 0);
    CHECK((info.st_mode & 0777) == 0600);
    auto x = read_entry(path);
    REQUIRE(x);
    CHECK(x->port == 4711);
    CHECK(x->address == "127.0.0.1");
    CHECK(x->secret.to_hex() == secret.to_hex());
    CHECK_FALSE(is_orphaned(*x));
  }
  CHECK_FALSE(std::filesystem::exists(path));
  CHECK_FALSE(read_entry(path));
}

TEST_CASE("An entry that others can read is refused",
          "[actors][inspection][R44]") {
  smp::test::scratch_dir dir;
  published_entry file{dir.path, entry_of_this_process(1, run_secret::make())};
  REQUIRE(::chmod(entry_path(dir.path).c_str(), 0644) == 0);
  auto why = error_of([&] { read_entry(entry_path(dir.path)); },
                      error_code::config);
  CHECK_THAT(why, ContainsSubstring("mode 0600"));
}

TEST_CASE("A file that no run wrote is not an entry", "[actors][inspection]") {
  smp::test::scratch_dir dir;
  dir.write("inspect.entry", "port 1\nsecret 00\n");
  REQUIRE(::chmod(entry_path(dir.path).c_str(), 0600) == 0);
  auto why = error_of([&] { read_entry(entry_path(dir.path)); },
                      error_code::config);
  CHECK_THAT(why, ContainsSubstring("not written by a run of smp"));
}

TEST_CASE("The entry of a process that is gone is an orphan",
          "[actors][inspection]") {
  auto x = entry_of_this_process(1, run_secret::make());
  ++x.start_time; // another process had this number
  CHECK(is_orphaned(x));
  x.host = "elsewhere";
  CHECK_FALSE(is_orphaned(x));
}
