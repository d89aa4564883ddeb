#pragma once

// Files that are read and written as a whole.

#include "transport/files/file_descriptor.hpp"

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <string_view>

namespace smp {

/// Throws the errors about one file.
class file_errors {
public:
  /// @param verb what is done with it: "read", "write"
  file_errors(const char* verb, const std::string& path);

  /// @throws error (config) "cannot VERB PATH: WHY"
  [[noreturn]] void fail(const std::string& why) const;

  /// Same for a system call that just failed: WHY ends with the text of errno.
  [[noreturn]] void fail_errno(const char* what) const;

private:
  std::string start_;
};

/// @throws error (config), also if the file has fewer bytes
void read_all(int fd, void* data, uint64_t size, const file_errors& e);

/// Syncs a folder, so that its entries survive a crash. @throws error (config)
void sync_folder(const std::string& folder, const file_errors& e);

/// Begins the part of the name of a `replacement`'s new file that follows the
/// name of the file which it replaces.
inline constexpr const char* partial_mark = ".partial-";

/// Writes a new file beside `path` that replaces it once complete, and that is
/// removed if it never gets there: a reader sees the old file or the whole new
/// one, even after a crash.
class replacement {
public:
  /// @pre both arguments outlive this
  replacement(const std::string& path, const file_errors& e);

  ~replacement();

  replacement(const replacement&) = delete;
  replacement& operator=(const replacement&) = delete;

  void write(const void* data, uint64_t size);

  /// Renames the new file to `path`. Its bytes reach the disk before the name
  /// does; otherwise a crash could leave an empty file under that name.
  void commit();

private:
  const std::string& path_;
  const file_errors& errors_;
  std::string temp_;
  file_descriptor fd_;
};

/// Removes from a folder the new files of `replacement`s that never committed,
/// for instance because their process was killed.
/// @param writer process number; 0: all processes. No process may still be
/// writing to such a file
void remove_leftovers(const std::string& folder, int64_t writer = 0);

/// @returns the whole file or its first `limit` bytes; nullopt, with errno set,
/// if it cannot be read
std::optional<std::string>
try_read(const std::string& path,
         uint64_t limit = std::numeric_limits<uint64_t>::max());

/// @returns the whole file. @throws error (config) naming `path`
std::string read_text(const std::string& path);

/// Writes `text` to `path`, whole or not at all. Anything but a regular file,
/// such as a pipe, is written to directly.
/// @throws error (config) naming `path`
void write_text(const std::string& path, std::string_view text);

} // namespace smp
