#include "tests/support/catch.hpp"

#include "runtime/base/print_stderr.hpp"
#include "runtime/process/output_tee.hpp"
#include "tests/support/scratch_dir.hpp"
#include "tests/support/stderr_to.hpp"

#include <algorithm>
#include <fstream>

#include <fcntl.h>
#include <unistd.h>

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

TEST_CASE("messages begin on a line of their own, not behind the progress",
          "[runtime][launch]") {
  scratch_dir dir;
  {
    stderr_to file{dir.path / "console"};
    {
      // Of rank 0, in its process and in that of its launcher.
      output_tee tee{(dir.path / "log-0.txt").string()};
      REQUIRE(::write(tee.err(), "step 1", 6) == 6);
    }
    print_stderr("smp: first\n");
    print_stderr("smp: second\n");
    print_stderr("step 2");
    print_stderr("\r\x1b[Kstep 3");
    print_stderr("\r\x1b[K");
    print_stderr("smp: {}\n", "third");
  }
  CHECK(dir.read("console")
        == "step 1\nsmp: first\nsmp: second\n"
           "step 2\r\x1b[Kstep 3\r\x1b[Ksmp: third\n");
}
