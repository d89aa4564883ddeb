#pragma once

// Ranks that another launcher starts.

#include "tests/support/runs/train_dir.hpp"

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace smp::test {

/// @param arguments of smp-train
/// @returns two ranks of one run, as torchrun starts them
inline std::vector<std::unique_ptr<program>>
start_as_torchrun(const train_dir& dir, std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), built_program("smp-train"));
  std::vector<std::unique_ptr<program>> result;
  for (int rank = 0; rank < 2; ++rank)
    result.push_back(
      std::make_unique<program>(arguments, dir.path,
                                std::map<std::string, std::string>{
                                  {"RANK", std::to_string(rank)},
                                  {"WORLD_SIZE", "2"},
                                  {"TORCHELASTIC_RUN_ID", dir.path.filename()},
                                  {"SMP_RENDEZVOUS_DIR", dir.path}}));
  return result;
}

} // namespace smp::test
