#pragma once

#include "partition/program.hpp"
#include "runtime/module_walk.hpp"
#include "transport/wait.hpp"

#include <ATen/core/Tensor.h>

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_set>
#include <vector>

namespace smp {

class engine;

/// What was decided, and from what.
struct partition_decision {
  model_info model;
  partition_plan plan;
};

/// The model of a session: where each module and tensor lives. Without a
/// partition everything is here.
class model_state {
public:
  model_state(engine& eng, std::shared_ptr<torch::nn::Module> root);

  /// Calls of the modules run here again; released parameters stay released.
  ~model_state();

  model_state(const model_state&) = delete;
  model_state& operator=(const model_state&) = delete;

  // -- partition --------------------------------------------------------------

  /// @returns where modules would go on so many devices.
  /// @throws error (config)
  partition_decision decide(uint32_t devices) const;

  /// Walks, decides, compares with the other ranks, and releases what this
  /// rank does not own (R14). Collective over the pipeline group; does nothing
  /// the second time.
  /// @throws error (config) naming the rank whose model differs
  void partition();

  bool partitioned() const noexcept {
    return partitioned_;
  }

  /// Calls `f` after the partition, or at once.
  void on_partition(std::function<void()> f);

  /// The decision for people, see partition/print.hpp.
  const std::string& text() const noexcept {
    return text_;
  }

  /// What a microbatch does on which rank, as far as the partition tells.
  const pipeline_program& program() const noexcept {
    return program_;
  }

  // -- properties -------------------------------------------------------------

  torch::nn::Module& root() const noexcept {
    return *root_;
  }

  const walked_model& model() const noexcept {
    return model_;
  }

  rank_id owner(module_id x) const {
    return owners_.at(x.value);
  }

  /// @param x position in `model().tensors`
  rank_id tensor_owner(uint32_t x) const;

  bool owned(uint32_t tensor) const {
    return tensor_owner(tensor) == self_;
  }

  const std::string& name(module_id x) const {
    return model_.modules.at(x.value).names.front();
  }

  const std::string& tensor_name(uint32_t x) const {
    return model_.tensors.at(x).names.front();
  }

  /// Tells whether the bytes of `x` are those of a parameter or buffer of this
  /// rank, which another microbatch may write (R13).
  bool shares_state(const at::Tensor& x) const;

  // -- foreign parameters (R14) -----------------------------------------------

  /// The value of a tensor of another rank, as a copy whose gradient goes to
  /// its owner. Parameters are fetched once per step, buffers each time.
  /// Parks; only inside a step.
  at::Tensor fetch(uint32_t tensor);

  /// Forgets the copies of the last step.
  void forget_copies();

private:
  void check_same_everywhere();
  void place();
  void release();

  using copy = std::shared_ptr<awaited<at::Tensor>>;

  engine& engine_;
  rank_id self_;
  std::shared_ptr<torch::nn::Module> root_;
  walked_model model_;
  bool partitioned_ = false;
  std::vector<rank_id> owners_; // by module
  std::string text_;
  pipeline_program program_;
  std::unordered_set<const void*> storages_; // of owned tensors
  std::vector<std::function<void()>> hooks_;
  std::mutex copies_mutex_;
  std::map<uint32_t, copy> copies_;
};

} // namespace smp
