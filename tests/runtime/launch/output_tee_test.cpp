#include "tests/support/catch.hpp"

#include "runtime/launch/output_tee.hpp"
#include "tests/support/scratch_dir.hpp"

#include <algorithm>
#include <fstream>

#include <fcntl.h>

using namespace smp;
using namespace smp::test;

TEST_CASE("what is written while a launcher is stopped has room in the pipes",
          "[runtime][launch]") {
  scratch_dir dir;
  output_tee tee{(dir.path / "log-0.txt").string()};
  int most = 0;
  std::ifstream{"/proc/sys/fs/pipe-max-size"} >> most;
  REQUIRE(most > 0);
  // A thousand lines of 80 bytes are more than a pipe has by default.
  CHECK(::fcntl(tee.out(), F_GETPIPE_SZ) >= std::min(most, 1 << 20));
  CHECK(::fcntl(tee.err(), F_GETPIPE_SZ) >= std::min(most, 1 << 20));
}
