#pragma once

// Module times in a file: one run measures them, others plan with them.

#include "partition/module_tree.hpp"

#include <nlohmann/json_fwd.hpp>

#include <cstdint>
#include <map>
#include <optional>
#include <string>

namespace smp {

/// Module times, measured or assumed by the user.
struct module_times {
  struct entry {
    /// Forward time in a microbatch, without the modules that it calls.
    double seconds = 0;
    // The module that was measured, if the file has it.
    std::optional<std::string> type;
    std::optional<uint64_t> parameters; // own elements
  };

  std::string file;
  std::map<std::string, entry> modules; // by path, "" is the root
  /// Seconds of each unlisted module; without it all modules must be listed.
  std::optional<double> others;
  double backward_ratio = 2; // backward time over forward time
  double hop_seconds = 0;    // from one rank to another
};

/// Reads {"modules": {"h.0": {"seconds": 0.01, "type": "gpt_block",
/// "parameters": 512}, "h.1": 0.02, ...}, "others": 0, "backward_ratio": 2,
/// "hop_seconds": 1e-4}; only `modules` is required; unknown keys are ignored.
/// @throws error (config) naming the file and what is wrong
module_times read_module_times(const std::string& path);

/// Gives each module its time.
/// @throws error (config) naming file and module of a mismatch with the model
void apply_times(const module_times& x, model_info& model);

/// @returns the times that a partition used, in the form of `modules` above;
/// null if there are none
nlohmann::json times_json(const model_info& model);

/// Writes the times of a model in the form that `read_module_times` reads.
/// @throws error (config) naming the file
void write_module_times(const std::string& path, const model_info& model);

} // namespace smp
