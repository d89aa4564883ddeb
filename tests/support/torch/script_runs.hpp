#pragma once

#include "smp/smp.hpp"

#include <torch/types.h>

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace smp::test {

/// Where the modules of a model go.
enum class spread {
  rank_0,     // all together
  scattered,  // one after the other in turn: a module is never with its parent
  contiguous, // the first ones on rank 0, ..., the last ones on the last rank
  layers,     // items of a list go in turn, each with all that is below it
  automatic,  // as the partitioner wants
};

/// A TorchScript file, and how it is trained.
struct script_job {
  std::string path;
  uint64_t ranks = 1;
  uint64_t microbatches = 1;
  std::string pipeline = "interleaved";
  spread placement = spread::scattered;
  /// Microbatches at once; 0: the default.
  uint64_t active = 0;
  int steps = 3;
  /// `smp.fast_mode`; nothing: as by default.
  std::optional<bool> fast = false;
  /// `smp.static_mode`, with one recorded step, and
  /// `smp.deterministic_server`; a divergence is an error.
  bool replays = false, fixed_order = false;
  /// What backward computes again, by patterns.
  std::vector<std::string> recompute = {};
  std::string strategy = "each";
  /// The same, as code says it, by paths.
  std::vector<std::string> marked = {};
  /// Ranks read from the file only what they own.
  bool deferred = false;
  /// The batch of a step. The default is one of [8, 8].
  std::function<std::vector<torch::Tensor>(int step)> batch = {};
};

/// The path of a file in tests/data/script.
std::string script_file(const std::string& name);

/// A file of tests/data/zoo with the batch that ships beside it, each step.
script_job zoo_job(const std::string& name);

/// What one step of the split model did.
struct script_step {
  uint64_t number = 0; // of the session, for the random streams
  std::map<std::string, torch::Tensor> before; // parameters and buffers
  std::map<std::string, torch::Tensor> gradients;
  std::map<std::string, torch::Tensor> after; // before the optimizer
  std::vector<torch::Tensor> losses;          // by microbatch
};

struct script_result {
  std::vector<script_step> steps;
  /// Tensors of the model that pp_rank 0 has not read before the partition.
  size_t deferred = 0;
  uint64_t requests = 0; // of all steps and ranks
  int replayed = 0;      // steps
  int ran_again = 0;     // steps
  size_t recomputed = 0; // modules that backward computes again
};

/// Pins the modules of a TorchScript model as `placement` says; modules that
/// share a tensor stay together.
void place(session& s, const distributed_model_base& model, spread placement);

/// Trains with SGD over virtual ranks.
/// @throws std::runtime_error if a step leaves saved calls or requests, or a
///         placeholder has a gradient
script_result run_split(const script_job& job);

/// Runs the steps again in one process on the file as it is, but that it tells
/// when methods begin and end (R36), and as eager PyTorch would: optimised code
/// draws random numbers where there is nothing to draw. Each step begins with
/// the pipeline's parameters and buffers (R35).
/// @returns what differs, one line each; empty if the numbers agree
std::vector<std::string> differences(const script_job& job,
                                     const script_result& seen);

} // namespace smp::test
