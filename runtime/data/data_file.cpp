#include "runtime/data/data_file.hpp"

#include "runtime/checkpoint/checksum.hpp"
#include "transport/error.hpp"
#include "transport/files/regular_file.hpp"

#include <fmt/chrono.h>
#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include <sys/stat.h>
#include <unistd.h>

namespace smp {

void refuse_data(const std::string& path, const std::string& why) {
  throw config_error(path + ": " + why);
}

namespace {

constexpr uint64_t block_size = 1 << 16;
constexpr size_t sampled_blocks = 256; // of all files together
constexpr size_t least_blocks = 2;     // of each

file_descriptor opened(const std::string& path) {
  std::string why;
  auto result = open_regular(path, why);
  if (!result)
    refuse_data(path, why);
  return result;
}

struct stat status_of(int fd, const std::string& path) {
  struct stat result = {};
  if (::fstat(fd, &result) != 0)
    refuse_data(path, std::strerror(errno));
  return result;
}

/// @returns how many bytes were read: fewer only at the end of the file
uint64_t read_at(int fd, uint64_t begin, uint64_t bytes, uint8_t* to,
                 const std::string& path) {
  uint64_t done = 0;
  while (done < bytes) {
    auto n = ::pread(fd, to + done, bytes - done,
                     static_cast<off_t>(begin + done));
    if (n < 0 && errno != EINTR)
      refuse_data(path, std::strerror(errno));
    if (n == 0)
      break;
    done += static_cast<uint64_t>(std::max<ssize_t>(n, 0));
  }
  return done;
}

/// Blocks evenly over the file, the first and the last among them.
uint64_t sample_of(int fd, const file_content& x, size_t blocks) {
  const auto whole = x.bytes <= blocks * block_size;
  std::vector<uint8_t> all(whole ? x.bytes : blocks * block_size);
  if (whole)
    read_at(fd, 0, x.bytes, all.data(), x.path);
  for (size_t i = 0; !whole && i < blocks; ++i)
    read_at(fd, (x.bytes - block_size) / (blocks - 1) * i, block_size,
            all.data() + i * block_size, x.path);
  return checksum(all.data(), all.size());
}

bool equal(const timespec& x, const timespec& y) {
  return x.tv_sec == y.tv_sec && x.tv_nsec == y.tv_nsec;
}

constexpr const char* way_out
  = "; a run needs files that stay as they are: restore this one and go on "
    "from a checkpoint, or begin anew";

} // namespace

file_watch::file_watch(int fd, const std::string& path, size_t among)
  : fd_(fd),
    blocks_(
      std::max(least_blocks, sampled_blocks / std::max<size_t>(among, 1))),
    content_{.path = path} {
  auto status = status_of(fd, path);
  content_.bytes = static_cast<uint64_t>(status.st_size);
  content_.changed = seen_ = status.st_mtim;
  content_.sample = sample_of(fd, content_, blocks_);
}

void file_watch::require_unchanged() const {
  auto status = status_of(fd_, content_.path);
  if (auto bytes = static_cast<uint64_t>(status.st_size);
      bytes < content_.bytes)
    refuse_data(
      content_.path,
      fmt::format("has {} bytes, but had {} when the run began; it was cut "
                  "or is being overwritten, {}{}",
                  bytes, content_.bytes, text_of(status.st_mtim), way_out));
  if (equal(status.st_mtim, seen_))
    return;
  if (sample_of(fd_, content_, blocks_) != content_.sample)
    refuse_data(content_.path,
                fmt::format("holds other bytes than when the run began; it was "
                            "overwritten, {}{}",
                            text_of(status.st_mtim), way_out));
  seen_ = status.st_mtim;
}

data_file::data_file(const std::string& path)
  : fd_(opened(path)), watch_(fd_.get(), path) {
  if (size() == 0)
    refuse_data(path, "is empty");
}

void data_file::read(uint64_t begin, uint64_t bytes, void* to) const {
  auto n = read_at(fd_.get(), begin, bytes, static_cast<uint8_t*>(to), path());
  if (n == bytes)
    return;
  watch_.require_unchanged();
  refuse_data(path(), fmt::format("ends at byte {}, though it has {}",
                                  begin + n, size()));
}

std::vector<uint8_t> data_file::read(uint64_t begin, uint64_t bytes) const {
  std::vector<uint8_t> result(bytes);
  read(begin, bytes, result.data());
  return result;
}

std::string text_of(const timespec& x) {
  return fmt::format("{:%Y-%m-%d %H:%M:%S} UTC", fmt::gmtime(x.tv_sec));
}

} // namespace smp
