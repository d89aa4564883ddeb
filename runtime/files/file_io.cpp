#include "runtime/files/file_io.hpp"

#include "runtime/files/errno_text.hpp"
#include "transport/error.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <filesystem>
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
  fail(std::string{what} + ": " + errno_text(code));
}

// -- descriptors --------------------------------------------------------------

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

void sync_folder(const std::string& folder, const file_errors& e) {
  file_descriptor dir{
    ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC)};
  if (!dir || ::fsync(dir.get()) != 0)
    e.fail_errno("fsync of its folder");
}

// -- replacement --------------------------------------------------------------

namespace {

/// The process number and a counter follow the mark: "model.partial-123-0".
/// @returns the process that wrote a file of this name; 0 for other files
int64_t writer_of(const std::string& name) {
  auto at = name.rfind(partial_mark);
  if (at == std::string::npos)
    return 0;
  int64_t pid = 0;
  int count = 0;
  int end = 0;
  auto rest = name.substr(at + std::strlen(partial_mark));
  if (std::sscanf(rest.c_str(), "%" SCNd64 "-%d%n", &pid, &count, &end) != 2
      || static_cast<size_t>(end) != rest.size())
    return 0;
  return pid;
}

} // namespace

void remove_leftovers(const std::string& folder, int64_t writer) {
  std::error_code ignored;
  for (auto& x : std::filesystem::directory_iterator{folder, ignored}) {
    auto pid = writer_of(x.path().filename().string());
    if (pid != 0 && (writer == 0 || writer == pid)
        && x.is_regular_file(ignored))
      ::unlink(x.path().c_str());
  }
}

replacement::replacement(const std::string& path, const file_errors& e)
  : path_(path), errors_(e) {
  for (int i = 0; !fd_; ++i) {
    temp_ = path + partial_mark + std::to_string(::getpid()) + "-"
            + std::to_string(i);
    fd_.reset(
      ::open(temp_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
    if (!fd_ && errno != EEXIST && errno != EINTR)
      e.fail_errno("create a file beside it");
  }
}

replacement::~replacement() {
  if (!temp_.empty())
    ::unlink(temp_.c_str());
}

void replacement::write(const void* data, uint64_t size) {
  write_all(fd_.get(), data, size, errors_);
}

void replacement::commit() {
  if (::fsync(fd_.get()) != 0)
    errors_.fail_errno("fsync");
  if (::close(fd_.release()) != 0)
    errors_.fail_errno("close");
  if (::rename(temp_.c_str(), path_.c_str()) != 0)
    errors_.fail_errno("rename");
  temp_.clear();
  auto slash = path_.rfind('/');
  auto folder = slash == std::string::npos ? "." : path_.substr(0, slash + 1);
  sync_folder(folder, errors_);
}

// -- text ---------------------------------------------------------------------

std::optional<std::string> try_read(const std::string& path, uint64_t limit) {
  // To open a pipe to which nobody writes would wait forever; to read it does
  // not.
  file_descriptor in{::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)};
  if (!in || ::fcntl(in.get(), F_SETFL, 0) != 0)
    return std::nullopt;
  // The reported size need not be right: files in /proc have size 0.
  std::string result;
  char buffer[1 << 16];
  while (result.size() < limit) {
    auto n = ::read(in.get(), buffer,
                    std::min<uint64_t>(sizeof(buffer), limit - result.size()));
    if (n < 0 && errno != EINTR)
      return std::nullopt;
    if (n == 0)
      break;
    if (n > 0)
      result.append(buffer, static_cast<size_t>(n));
  }
  return result;
}

std::string read_text(const std::string& path) {
  file_errors e{"read", path};
  if (std::filesystem::is_directory(path))
    e.fail("it is a directory");
  auto result = try_read(path);
  if (!result)
    e.fail_errno("open");
  return std::move(*result);
}

void write_text(const std::string& path, std::string_view text) {
  file_errors e{"write", path};
  std::error_code ignored;
  if (std::filesystem::exists(path, ignored)
      && !std::filesystem::is_regular_file(path, ignored)) {
    file_descriptor out{::open(path.c_str(), O_WRONLY | O_CLOEXEC)};
    if (!out)
      e.fail_errno("open");
    write_all(out.get(), text.data(), text.size(), e);
    return;
  }
  // Replace the target of a symbolic link, not the link.
  auto target = std::filesystem::weakly_canonical(path, ignored).string();
  if (target.empty())
    target = path;
  replacement out{target, e};
  out.write(text.data(), text.size());
  out.commit();
}

} // namespace smp
