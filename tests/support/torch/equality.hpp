#pragma once

#include "smp/smp.hpp"

#include <torch/types.h>

#include <map>
#include <string>
#include <vector>

namespace smp::test {

/// One training step of the quickstart's architecture, small, as a pipeline
/// ran it.
struct step_numbers {
  uint64_t number = 0; // of the session, for the random streams
  std::map<std::string, torch::Tensor> before; // parameters
  std::map<std::string, torch::Tensor> gradients;
  std::map<std::string, torch::Tensor> after;
  std::vector<torch::Tensor> losses; // by microbatch
};

/// Trains five steps on all ranks of the session. Collective.
/// @returns the steps on pp_rank 0, nothing elsewhere
/// @throws std::runtime_error if a step leaves saved calls or requests (R3)
std::vector<step_numbers> run_steps(session& s, uint64_t microbatches,
                                    double dropout);

/// The same by a plain LibTorch loop that shares no line with runtime/ (R36):
/// each step begins with the pipeline's parameters, so that rounding does not
/// add up, and the optimizer is fed with the pipeline's gradients (R35).
/// @returns what differs, one line each; empty if the numbers agree
std::vector<std::string> differences(const std::vector<step_numbers>& steps,
                                     uint64_t seed, uint64_t microbatches,
                                     double dropout);

/// Writes and reads `run_steps`'s result.
void save(const std::string& path, const std::vector<step_numbers>& steps);
std::vector<step_numbers> load(const std::string& path);

} // namespace smp::test
