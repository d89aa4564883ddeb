#pragma once

// The file in a run directory that tells where one may look at the run, and
// that whoever reads it may. Free of CAF.

#include "transport/run_secret.hpp"

#include <cstdint>
#include <optional>
#include <string>

namespace smp {

/// Where an `inspection_port` is, and of whom.
struct inspection_entry {
  std::string address = "127.0.0.1";
  /// 0: the run begins, and nobody can be asked yet.
  uint16_t port = 0;
  /// Opens this port and nothing else of the run.
  run_secret secret;
  /// Of the process that listens there.
  int64_t pid = 0;
  uint64_t start_time = 0; // see process_state
  std::string host;
};

/// @returns an entry of this process
inspection_entry entry_of_this_process(uint16_t port, const run_secret& secret);

/// @returns RUN_DIR/inspect.entry
std::string entry_path(const std::string& run_dir);

/// The file, while this lives. Nobody but its user can read it.
class published_entry {
public:
  /// @throws error (config) naming the file if it cannot be written
  published_entry(const std::string& run_dir, const inspection_entry& x);
  ~published_entry();
  published_entry(const published_entry&) = delete;
  published_entry& operator=(const published_entry&) = delete;

private:
  std::string path_;
};

/// @returns what stands in the file; nothing if there is none
/// @throws error (config) if others can read it, or if it is none of smp's
std::optional<inspection_entry> read_entry(const std::string& path);

/// Tells whether the process that wrote it is known to be gone. (Of one on
/// another machine nothing is known.)
bool is_orphaned(const inspection_entry& x);

} // namespace smp
