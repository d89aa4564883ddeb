#pragma once

// The file in a run directory with the address of the port where clients can
// observe the run; read access to it grants that right. Free of CAF.

#include "transport/files/run_secret.hpp"

#include <cstdint>
#include <optional>
#include <string>

namespace smp {

/// The address of an `inspection_port` and the process that owns it.
struct inspection_entry {
  std::string address = "127.0.0.1";
  /// 0: the run is starting and has no port yet.
  uint16_t port = 0;
  /// Grants access to this port and to nothing else of the run.
  run_secret secret;
  /// Of the process that owns the port.
  int64_t pid = 0;
  uint64_t start_time = 0; // see process_state
  std::string host;
};

/// @returns an entry of this process
inspection_entry entry_of_this_process(uint16_t port, const run_secret& secret);

/// @returns RUN_DIR/inspect.entry
std::string entry_path(const std::string& run_dir);

/// Keeps the file while this object lives. Only its owner can read it.
class published_entry {
public:
  /// @throws error (config) naming the file if it cannot be written
  published_entry(const std::string& run_dir, const inspection_entry& x);
  ~published_entry();

  /// The run goes on elsewhere. @throws error (config) as above
  void replace(const inspection_entry& x);

  published_entry(const published_entry&) = delete;
  published_entry& operator=(const published_entry&) = delete;

private:
  std::string path_;
};

/// @returns the contents of the file; nothing if there is none
/// @throws error (config) if others can read it, or if smp did not write it
std::optional<inspection_entry> read_entry(const std::string& path);

/// Tells whether the process that wrote the entry is known to be gone.
/// (Processes on other machines are unknown.)
bool is_orphaned(const inspection_entry& x);

} // namespace smp
