#pragma once

// How long modules take, as a file.

#include "partition/module_tree.hpp"

#include <map>
#include <string>

namespace smp {

/// Times that somebody measured or wants to assume.
struct module_times {
  /// Seconds of one forward call, without what is in the list itself, by module
  /// path; all else takes no time.
  std::map<std::string, double> modules;
  double backward_ratio = 2; // backward time over forward time
  double hop_seconds = 0;    // from one rank to another
};

/// Reads {"modules": {"h.0": 0.01, ...}, "backward_ratio": 2,
/// "hop_seconds": 1e-4}; only `modules` is required.
/// @throws error (config) naming the file and what is wrong
module_times read_module_times(const std::string& path);

/// Writes the times with which a partition counted, to be read back.
/// @throws error (config) naming the file
void write_module_times(const std::string& path, const model_info& model);

} // namespace smp
