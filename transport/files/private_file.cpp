#include "transport/files/private_file.hpp"

#include "transport/error.hpp"
#include "transport/files/file_descriptor.hpp"

#include <cerrno>
#include <cstdio>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

namespace smp {

namespace {

/// The longest file that is read here, in bytes.
constexpr size_t private_file_limit = 4096;

bool write_draft(const std::string& path, const std::string& text) {
  ::unlink(path.c_str());
  file_descriptor file{::open(
    path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600)};
  errno = file ? ENOSPC : errno; // a short write sets none
  return file
         && ::write(file.get(), text.data(), text.size())
              == static_cast<ssize_t>(text.size());
}

} // namespace

std::optional<std::string> read_private_file(const std::string& path) {
  // To open a pipe would wait for somebody who writes to it.
  file_descriptor file{
    ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOCTTY | O_NONBLOCK)};
  struct stat info {};
  if (!file || ::fstat(file.get(), &info) != 0)
    return std::nullopt;
  if (!S_ISREG(info.st_mode) || (info.st_mode & 0077) != 0
      || (info.st_uid != ::geteuid() && info.st_uid != 0))
    throw config_error(path
                       + ": must be a file of this user that no one else can "
                         "read (mode 0600)");
  std::string result(private_file_limit, '\0');
  auto size = ::pread(file.get(), result.data(), result.size(), 0);
  if (size < 0)
    return std::nullopt;
  result.resize(static_cast<size_t>(size));
  return result;
}

int write_private_file(const std::string& path, const std::string& text) {
  auto draft = path + '.' + std::to_string(::getpid());
  if (write_draft(draft, text) && std::rename(draft.c_str(), path.c_str()) == 0)
    return 0;
  auto problem = errno;
  ::unlink(draft.c_str());
  return problem;
}

} // namespace smp
