#pragma once

#include "runtime/train/trainer.hpp"
#include "runtime/verify/findings.hpp"

#include <cstdint>
#include <string>
#include <vector>

namespace smp::test {

class scratch_dir;

/// A job that a comparison with one process runs, and how it is cut.
struct verify_case {
  std::string name;
  train_config config; // over the loopback fabric
  train_job job;
};

/// A small GPT as a configuration names it, on synthetic tokens.
verify_case gpt_case(uint64_t ranks, const std::string& pipeline,
                     uint64_t microbatches);

/// A model that no configuration names, all ranks taking part:
///
///   norm      batch norms on the last rank
///   remote    a parameter of rank 0 is an argument of a module on the last
///   long      a parameter too long for sums in float32
///   dropout   dropout on every rank
///   reuse     one module, three calls per microbatch
///   branch    how many modules run depends on the numbers
///   frozen    half of the parameters take no gradient
///   unused    a module whose result nobody uses, one that never runs
///   towers    two branches that meet, and a skip link around both
verify_case model_case(const std::string& model, uint64_t ranks,
                       const std::string& pipeline, uint64_t microbatches);

/// A TorchScript file of tests/data/zoo, with the batch beside it.
verify_case script_case(const std::string& model, uint64_t ranks,
                        uint64_t microbatches);

/// Writes a batch with 16 times its rows, each time their tokens elsewhere, so
/// that more than 4 KB are between modules. @returns the file
std::string longer_batch(const std::string& path, const scratch_dir& dir);

/// What a rank did besides.
struct rank_counts {
  uint64_t offloaded_bytes = 0; // in all steps
  uint64_t buckets = 0;         // of its gradients
};

/// Compares two steps on virtual ranks. @returns what rank 0 found
/// @param split see `verify_options`
/// @param ranks where not null, gets what each rank did besides
verify_summary run_case(const verify_case& x, uint64_t steps = 2,
                        bool split = false,
                        std::vector<rank_counts>* ranks = nullptr);

} // namespace smp::test
