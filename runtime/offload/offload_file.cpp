#include "runtime/offload/offload_file.hpp"

#include "transport/error.hpp"
#include "transport/files/file_descriptor.hpp"

#include <cerrno>
#include <cstdlib>
#include <cstring>

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/vfs.h>
#include <unistd.h>

namespace smp {

namespace {

class unnamed_file final : public offload_file {
public:
  explicit unnamed_file(file_descriptor fd) : fd_(std::move(fd)) {
    // nop
  }

  int reserve(uint64_t offset, uint64_t bytes) override {
    for (;;) {
      if (::fallocate(fd_.get(), 0, static_cast<off_t>(offset),
                      static_cast<off_t>(bytes))
          == 0)
        return 0;
      // Then the write tells whether there is room.
      if (errno == EOPNOTSUPP || errno == ENOSYS)
        return 0;
      if (errno != EINTR)
        return errno;
    }
  }

  int write(const void* data, uint64_t bytes, uint64_t offset) override {
    return move(bytes, offset, [&](uint64_t at, uint64_t n, off_t to) {
      return ::pwrite(fd_.get(), static_cast<const char*>(data) + at, n, to);
    });
  }

  int read(void* data, uint64_t bytes, uint64_t offset) override {
    return move(bytes, offset, [&](uint64_t at, uint64_t n, off_t from) {
      return ::pread(fd_.get(), static_cast<char*>(data) + at, n, from);
    });
  }

private:
  template <class F>
  static int move(uint64_t bytes, uint64_t offset, F f) {
    for (uint64_t done = 0; done < bytes;) {
      auto n = f(done, bytes - done, static_cast<off_t>(offset + done));
      if (n > 0)
        done += static_cast<uint64_t>(n);
      else if (n == 0)
        return EIO;
      else if (errno != EINTR)
        return errno;
    }
    return 0;
  }

  file_descriptor fd_;
};

[[noreturn]] void fail(const std::string& dir) {
  throw config_error("cannot make a file in '" + dir
                     + "' for activations: " + std::strerror(errno)
                     + "; name a folder on a disk in smp.offload_dir");
}

} // namespace

std::string default_offload_dir() {
  auto* dir = std::getenv("TMPDIR");
  return dir != nullptr && *dir != '\0' ? dir : "/var/tmp";
}

std::unique_ptr<offload_file> open_offload_file(const std::string& dir) {
  file_descriptor fd{
    ::open(dir.c_str(), O_TMPFILE | O_RDWR | O_EXCL | O_CLOEXEC, 0600)};
  if (!fd && (errno == EOPNOTSUPP || errno == EISDIR || errno == EINVAL)) {
    // A file system, as NFS, that has only files with names.
    auto path = dir + "/smp-offload-XXXXXX";
    fd.reset(::mkostemp(path.data(), O_CLOEXEC));
    if (fd && ::unlink(path.c_str()) != 0)
      fail(dir);
  }
  if (!fd)
    fail(dir);
  return std::make_unique<unnamed_file>(std::move(fd));
}

bool is_in_memory(const std::string& dir) noexcept {
  struct statfs x {};
  if (::statfs(dir.c_str(), &x) != 0)
    return false;
  return x.f_type == TMPFS_MAGIC || x.f_type == RAMFS_MAGIC;
}

} // namespace smp
