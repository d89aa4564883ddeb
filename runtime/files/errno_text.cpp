#include "runtime/files/errno_text.hpp"

#include <fmt/format.h>

#include <cerrno>
#include <cstdint>
#include <system_error>

#include <sys/resource.h>

namespace smp {

std::string errno_text(int x) {
  auto result = std::generic_category().message(x);
  rlimit files{};
  if (x == EFBIG && ::getrlimit(RLIMIT_FSIZE, &files) == 0
      && files.rlim_cur != RLIM_INFINITY)
    result += fmt::format(" (ulimit -f allows {} bytes)",
                          static_cast<uint64_t>(files.rlim_cur));
  return result;
}

} // namespace smp
