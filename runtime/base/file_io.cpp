#include "runtime/base/file_io.hpp"

#include "transport/error.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <system_error>
#include <utility>

namespace smp {

namespace {

void write_all(int fd, const void* data, uint64_t size, const file_errors& e) {
  auto bytes = static_cast<const char*>(data);
  while (size > 0) {
    auto n = ::write(fd, bytes, std::min<uint64_t>(size, 1u << 30));
    if (n < 0) {
      if (errno == EINTR)
        continue;
      e.fail_errno("write");
    }
    bytes += n;
    size -= static_cast<uint64_t>(n);
  }
}

} // namespace

// -- errors -------------------------------------------------------------------

file_errors::file_errors(const char* verb, const std::string& path)
  : start_(std::string{"cannot "} + verb + " " + path + ": ") {
  // nop
}

void file_errors::fail(const std::string& why) const {
  throw error{error_code::config, start_ + why};
}

void file_errors::fail_errno(const char* what) const {
  auto code = errno;
  fail(std::string{what} + ": " + std::generic_category().message(code));
}

// -- descriptors --------------------------------------------------------------

file::~file() {
  if (fd_ >= 0)
    ::close(fd_);
}

void read_all(int fd, void* data, uint64_t size, const file_errors& e) {
  auto bytes = static_cast<char*>(data);
  while (size > 0) {
    auto n = ::read(fd, bytes, std::min<uint64_t>(size, 1u << 30));
    if (n < 0 && errno == EINTR)
      continue;
    if (n < 0)
      e.fail_errno("read");
    if (n == 0)
      e.fail("it became shorter while it was read");
    bytes += n;
    size -= static_cast<uint64_t>(n);
  }
}

// -- replacement --------------------------------------------------------------

replacement::replacement(const std::string& path, const file_errors& e)
  : path_(path), errors_(e) {
  for (int i = 0; fd_ < 0; ++i) {
    temp_ = path + ".partial-" + std::to_string(::getpid()) + "-"
            + std::to_string(i);
    fd_ = ::open(temp_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (fd_ < 0 && errno != EEXIST && errno != EINTR)
      e.fail_errno("create a file beside it");
  }
}

replacement::~replacement() {
  if (fd_ >= 0)
    ::close(fd_);
  if (!temp_.empty())
    ::unlink(temp_.c_str());
}

void replacement::write(const void* data, uint64_t size) {
  write_all(fd_, data, size, errors_);
}

void replacement::commit() {
  if (::fsync(fd_) != 0)
    errors_.fail_errno("fsync");
  if (::close(std::exchange(fd_, -1)) != 0)
    errors_.fail_errno("close");
  if (::rename(temp_.c_str(), path_.c_str()) != 0)
    errors_.fail_errno("rename");
  temp_.clear();
  auto slash = path_.rfind('/');
  auto folder = slash == std::string::npos ? "." : path_.substr(0, slash + 1);
  file dir{::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC)};
  if (dir.fd() < 0 || ::fsync(dir.fd()) != 0)
    errors_.fail_errno("fsync of its folder");
}

// -- text ---------------------------------------------------------------------

std::string read_text(const std::string& path) {
  file_errors e{"read", path};
  if (std::filesystem::is_directory(path))
    e.fail("it is a directory");
  std::ifstream in{path, std::ios::binary};
  if (!in)
    e.fail_errno("open");
  std::string result{std::istreambuf_iterator<char>{in}, {}};
  if (in.bad())
    e.fail_errno("read");
  return result;
}

void write_text(const std::string& path, std::string_view text) {
  file_errors e{"write", path};
  std::error_code ignored;
  if (std::filesystem::exists(path, ignored)
      && !std::filesystem::is_regular_file(path, ignored)) {
    file out{::open(path.c_str(), O_WRONLY | O_CLOEXEC)};
    if (out.fd() < 0)
      e.fail_errno("open");
    write_all(out.fd(), text.data(), text.size(), e);
    return;
  }
  // A link keeps pointing where it does.
  auto target = std::filesystem::weakly_canonical(path, ignored).string();
  if (target.empty())
    target = path;
  replacement out{target, e};
  out.write(text.data(), text.size());
  out.commit();
}

} // namespace smp
