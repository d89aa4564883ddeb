#pragma once

#include <cstdint>
#include <memory>
#include <string>

namespace smp {

/// A file without a name, used by one thread. It is not mapped into memory, as
/// a failing disk would then kill the process by a signal, and mapped pages
/// count as memory of the process.
class offload_file {
public:
  virtual ~offload_file() = default;

  /// Makes the file longer and reserves the space on disk. @returns 0 or errno
  virtual int reserve(uint64_t offset, uint64_t bytes) = 0;

  /// @returns 0 or errno
  virtual int write(const void* data, uint64_t bytes, uint64_t offset) = 0;

  /// @returns 0 or errno; EIO for bytes that the file does not have
  virtual int read(void* data, uint64_t bytes, uint64_t offset) = 0;
};

/// @returns the folder for large temporary files: TMPDIR, or /var/tmp, which is
/// on a disk where /tmp is in memory
std::string default_offload_dir();

/// Creates an empty file in `dir` that never has a name, or only for a moment:
/// however this process ends, the file is gone.
/// @throws error (config) naming the folder
std::unique_ptr<offload_file> open_offload_file(const std::string& dir);

/// Tells whether what is written in `dir` stays in memory, as in a tmpfs.
bool is_in_memory(const std::string& dir) noexcept;

} // namespace smp
