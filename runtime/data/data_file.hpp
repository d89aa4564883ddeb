#pragma once

// Files that a run reads again and again for days, while anybody may write to
// them.

#include "transport/files/file_descriptor.hpp"

#include <cstddef>
#include <cstdint>
#include <ctime>
#include <string>
#include <vector>

namespace smp {

/// What tells one content of a file from another without reading all of it.
struct file_content {
  std::string path;
  uint64_t bytes = 0;
  /// Checksum of up to 16 MB, in blocks evenly over the file: of all that files
  /// up to this size hold.
  uint64_t sample = 0;
  timespec changed = {}; // when it was last written to
};

/// Notices if a file changes while a run reads it. Training would go on with
/// other numbers, and no resumed run could repeat them.
class file_watch {
public:
  /// Remembers the content as it is now.
  /// @param fd of a regular file, open for as long as this is used
  /// @param among of how many files this is one; they share the sample's size
  /// @throws error (config) naming `path`
  file_watch(int fd, const std::string& path, size_t among = 1);

  const file_content& content() const noexcept {
    return content_;
  }

  /// Call it after each batch of reads, so that it sees every change that these
  /// could have seen. Costs one system call unless the file was written to. It
  /// may have been touched, and may have grown: what was there counts.
  /// @throws error (config) naming `path`: shorter, or other bytes
  void require_unchanged() const;

private:
  int fd_;
  size_t blocks_;
  file_content content_;
  mutable timespec seen_; // the time of the last change that was looked at
};

/// A file of bytes in which a run reads here and there. It is not mapped: with
/// a mapping, a file that someone cuts ends the process by a signal.
class data_file {
public:
  /// @throws error (config) naming `path`: cannot be opened, is not a regular
  ///         file, or is empty
  explicit data_file(const std::string& path);

  const std::string& path() const noexcept {
    return watch_.content().path;
  }

  uint64_t size() const noexcept {
    return watch_.content().bytes;
  }

  const file_content& content() const noexcept {
    return watch_.content();
  }

  /// @pre these bytes were in the file when it was opened
  /// @throws error (config) naming `path`
  void read(uint64_t begin, uint64_t bytes, void* to) const;

  std::vector<uint8_t> read(uint64_t begin, uint64_t bytes) const;

  /// See `file_watch`.
  void require_unchanged() const {
    watch_.require_unchanged();
  }

private:
  file_descriptor fd_;
  file_watch watch_;
};

/// @throws error (config) "PATH: WHY"
[[noreturn]] void refuse_data(const std::string& path, const std::string& why);

/// @returns a time for people: "2026-11-23 02:05:44 UTC"
std::string text_of(const timespec& x);

} // namespace smp
