#include "tests/simulated/driver/files.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <string>

namespace smp::sim {

void fail(const char* what) {
  throw std::runtime_error{std::string{"simulated device: "} + what + ": "
                           + std::strerror(errno)};
}

int make_shared_file(const char* name, size_t size) {
  auto file = memfd_create(name, MFD_CLOEXEC);
  if (file < 0 || ftruncate(file, static_cast<off_t>(size)) != 0)
    fail("making shared memory");
  return file;
}

int open_shared_file(int32_t process, int32_t descriptor) {
  auto path = "/proc/" + std::to_string(process) + "/fd/"
              + std::to_string(descriptor);
  auto file = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (file < 0)
    fail("opening what another process exported");
  return file;
}

} // namespace smp::sim
