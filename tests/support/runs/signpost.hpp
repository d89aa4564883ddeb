#pragma once

#include "tests/support/catch.hpp"

#include "tests/support/scratch_dir.hpp"

#include <cerrno>
#include <chrono>
#include <stdexcept>
#include <string>

#include <fcntl.h>
#include <poll.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace smp::test {

/// A named pipe by which a script says that it has come to a place.
class signpost {
public:
  signpost(const scratch_dir& dir, const char* name) : path_(dir.path / name) {
    REQUIRE(::mkfifo(path_.c_str(), 0600) == 0);
  }

  /// Blocks until `count` scripts have written a line.
  void wait_for(size_t count) const {
    // For reading and writing: a writer that is done must not end the stream.
    auto fd = ::open(path_.c_str(), O_RDWR | O_CLOEXEC);
    if (fd < 0) // not REQUIRE: threads wait here
      throw std::runtime_error{"cannot open " + path_};
    for (char c; count > 0 && ::read(fd, &c, 1) == 1;)
      count -= c == '\n';
    ::close(fd);
  }

private:
  std::string path_;
};

/// @returns true if the process ends within `limit`; it need not be a child.
inline bool ends_within(pid_t pid, std::chrono::milliseconds limit) {
  auto fd = static_cast<int>(::syscall(SYS_pidfd_open, pid, 0));
  if (fd < 0)
    return errno == ESRCH;
  pollfd x{fd, POLLIN, 0};
  auto ready = ::poll(&x, 1, static_cast<int>(limit.count()));
  ::close(fd);
  return ready == 1;
}

} // namespace smp::test
