#pragma once

// The same job in one process, for comparison: an ordinary training loop that
// uses nothing of the pipeline (R36). It knows the job, LibTorch and the seeds
// of the random streams, nothing else.

#include "runtime/train/trainer.hpp"
#include "runtime/verify/step_comparison.hpp"

#include <map>
#include <memory>
#include <string>
#include <vector>

namespace smp {

class reference_run {
public:
  /// @param config, job outlive this
  reference_run(const train_config& config, const train_job& job);

  ~reference_run();

  reference_run(const reference_run&) = delete;
  reference_run& operator=(const reference_run&) = delete;

  /// Names of all parameters and buffers, each tensor once.
  std::vector<std::string> names() const;

  /// Loads the parameters and buffers of the file train.init_from, with all of
  /// their digits where parameters in half precision have float32 weights.
  /// @param names of each tensor, of which the file may have any
  void begin_from(const std::vector<tensor_names>& names);

  /// Sets parameters and buffers; ignores names that the model does not have.
  void load(const std::map<std::string, at::Tensor>& state);

  struct moment {
    uint64_t number = 0; // of the run, from 1
    uint64_t drawn = 0;  // `drawn_step`: part of the random streams' seeds
    uint64_t data_rank = 0;
    uint64_t replicas = 1; // that share each batch
    double loss_scale = 1;
  };

  /// Forward and backward of all microbatches, one after the other.
  /// @throws error (internal) if the graph contains a node of smp
  step_evidence run(const moment& x);

  /// @returns the loss of the first held-out batch in evaluation mode, the mean
  /// over microbatches
  double evaluate(const moment& x);

  /// Clips and applies `gradients`, those of the pipeline, so that the
  /// optimizer is compared separately (R35).
  void update(const moment& x,
              const std::map<std::string, at::Tensor>& gradients,
              step_evidence& result);

private:
  struct state;

  std::unique_ptr<state> state_;
};

} // namespace smp
