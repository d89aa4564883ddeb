#include "transport/files/regular_file.hpp"

#include <cerrno>
#include <cstring>

#include <fcntl.h>
#include <sys/stat.h>

namespace smp {

file_descriptor open_regular(const std::string& path, std::string& why) {
  file_descriptor result{
    ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOCTTY | O_NONBLOCK)};
  struct stat status = {};
  if (!result || ::fstat(result.get(), &status) != 0) {
    why = std::strerror(errno);
    return {};
  }
  if (S_ISREG(status.st_mode))
    return result;
  errno = S_ISDIR(status.st_mode) ? EISDIR : EINVAL;
  why = S_ISDIR(status.st_mode) ? std::strerror(errno)
                                : "is not a regular file";
  return {};
}

} // namespace smp
