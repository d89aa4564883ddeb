#pragma once

#include "runtime/checkpoint/checkpoint.hpp"
#include "transport/wait.hpp"

#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace smp {

class checkpoint_writer;
class rank_context;

/// A checkpoint that is written in the background: training goes on once there
/// is a copy. It ends with the session at the latest.
class pending_checkpoint {
public:
  /// Takes a copy, in host memory, and begins to write it. Arguments, errors
  /// and collective as of `save_checkpoint`. Where memory is so short that
  /// something is offloaded, or that the copies of all ranks do not fit, there
  /// is none, and all is written before this returns.
  /// @pre every other checkpoint of the session was awaited
  pending_checkpoint(const std::string& path, uint64_t step,
                     const distributed_model_base& model,
                     const std::vector<distributed_optimizer*>& optimizers,
                     const checkpoint_options& x);

  /// Waits for the writing thread, which ends when ranks that it needs do.
  ~pending_checkpoint();

  pending_checkpoint(const pending_checkpoint&) = delete;
  pending_checkpoint& operator=(const pending_checkpoint&) = delete;

  uint64_t step() const noexcept {
    return step_;
  }

  /// Whether this rank has done its part; on rank 0, whether there is a
  /// checkpoint, or never will be.
  bool done() const {
    return written_->done();
  }

  /// Waits for the checkpoint. Collective over the world; once.
  /// @throws error as `save_checkpoint`
  saved_checkpoint await();

private:
  friend saved_checkpoint
  save_checkpoint(const std::string&, uint64_t, const distributed_model_base&,
                  const std::vector<distributed_optimizer*>&,
                  const checkpoint_options&);

  using folder_and_bytes = std::pair<std::string, uint64_t>;

  pending_checkpoint(const std::string& path, uint64_t step,
                     const distributed_model_base& model,
                     const std::vector<distributed_optimizer*>& optimizers,
                     const checkpoint_options& x, bool may_copy);

  void write(checkpoint_writer& x);

  const rank_context& rank_;
  const uint64_t step_;
  double seconds_ = 0; // for which the run stood still
  std::shared_ptr<awaited<folder_and_bytes>> written_;
  std::thread thread_;
};

} // namespace smp
