#pragma once

// Files that are read and written as a whole.

#include "transport/file_descriptor.hpp"

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <string_view>

namespace smp {

/// Says what is wrong with a file.
class file_errors {
public:
  /// @param verb what is done with it: "read", "write"
  file_errors(const char* verb, const std::string& path);

  /// @throws error (config) "cannot VERB PATH: WHY"
  [[noreturn]] void fail(const std::string& why) const;

  /// For system calls that just failed.
  [[noreturn]] void fail_errno(const char* what) const;

private:
  std::string start_;
};

/// @throws error (config), also if the file has fewer bytes
void read_all(int fd, void* data, uint64_t size, const file_errors& e);

/// Makes the names in a folder last beyond a crash. @throws error (config)
void sync_folder(const std::string& folder, const file_errors& e);

/// A new file beside `path` that takes its place when it is complete, and
/// goes away when it does not come to that: a reader sees the old file or the
/// whole new one, also after a crash.
class replacement {
public:
  /// @pre both arguments outlive this
  replacement(const std::string& path, const file_errors& e);

  ~replacement();

  replacement(const replacement&) = delete;
  replacement& operator=(const replacement&) = delete;

  void write(const void* data, uint64_t size);

  /// Puts the file in its place. Its bytes reach the disk before its name
  /// does, or a crash could leave the name of an empty file.
  void commit();

private:
  const std::string& path_;
  const file_errors& errors_;
  std::string temp_;
  file_descriptor fd_;
};

/// Removes the new files of `replacement`s that ended in the middle, as by a
/// kill, from a folder.
/// @param writer process number; 0: of all processes. No such file may still be
/// written to
void remove_leftovers(const std::string& folder, int64_t writer = 0);

/// @returns the whole file or its first `limit` bytes; nothing, with errno set,
/// if it cannot be read
std::optional<std::string>
try_read(const std::string& path,
         uint64_t limit = std::numeric_limits<uint64_t>::max());

/// @returns the whole file. @throws error (config) naming `path`
std::string read_text(const std::string& path);

/// Writes `text` to `path`, whole or not at all; what is no regular file, such
/// as a pipe, is written to as it is.
/// @throws error (config) naming `path`
void write_text(const std::string& path, std::string_view text);

} // namespace smp
