#include "runtime/files/folder_lock.hpp"

#include "runtime/files/file_io.hpp"
#include "transport/error.hpp"

#include <fmt/format.h>

#include <cerrno>
#include <filesystem>
#include <system_error>
#include <thread>

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

namespace smp {

namespace {

constexpr std::chrono::milliseconds between_tries{50};
constexpr size_t longest_name = 4096;

/// @returns false if another run has the lock all the time
bool lock(int fd, std::chrono::milliseconds patience) {
  const auto end = std::chrono::steady_clock::now() + patience;
  // NFS makes it a lock that all machines see.
  while (::flock(fd, LOCK_EX | LOCK_NB) != 0) {
    if (errno == EINTR)
      continue;
    if (errno != EWOULDBLOCK)
      return true; // the file system knows no locks
    if (std::chrono::steady_clock::now() > end)
      return false;
    std::this_thread::sleep_for(between_tries);
  }
  return true;
}

} // namespace

folder_lock::folder_lock(const std::string& dir, const std::string& who,
                         std::chrono::milliseconds patience) {
  std::error_code why;
  std::filesystem::create_directories(dir, why);
  if (why)
    file_errors{"make", dir}.fail(why.message());
  auto path = (std::filesystem::path{dir} / ".smp-lock").string();
  file_errors e{"write", path};
  // Locks over NFS need a file that is open for writing.
  file_.reset(
    ::open(path.c_str(), O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0666));
  if (!file_)
    e.fail_errno("open");
  if (!lock(file_.get(), patience)) {
    auto other = try_read(path, longest_name).value_or("");
    throw config_error(fmt::format(
      "{}: another run saves its checkpoints there{}{}; wait until it ends, or "
      "save in another folder (checkpoint.dir)",
      dir, other.empty() ? "" : ", ", other));
  }
  if (::ftruncate(file_.get(), 0) != 0
      || ::pwrite(file_.get(), who.data(), who.size(), 0)
           != static_cast<ssize_t>(who.size()))
    e.fail_errno("write");
}

} // namespace smp
