#pragma once

#include "runtime/model/module_order.hpp"
#include "runtime/model/module_walk.hpp"
#include "tp/distributed_module.hpp"
#include "transport/ids.hpp"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <unordered_set>
#include <vector>

namespace smp {

/// Activation checkpointing of a module (R52).
struct recomputation {
  /// Modules with the same number, consecutive children of a Sequential on one
  /// rank, are computed again together; 0: it is not computed again.
  uint32_t region = 0;
  /// With the random numbers of the first time.
  bool same_numbers = true;
};

/// Where each module and tensor of a model lives. Without a partition
/// everything is on the own rank.
class model_map {
public:
  /// @param ranks that run a step together: of the pipeline, and all that share
  ///        modules with it
  model_map(rank_id self, size_t ranks, walked_model model);

  rank_id self() const noexcept {
    return self_;
  }

  const walked_model& model() const noexcept {
    return model_;
  }

  /// Which modules microbatches pass in their order (R19).
  const module_order& order() const noexcept {
    return order_;
  }

  /// Tells whether owners are known; calls of the modules may be remote then.
  bool partitioned() const noexcept {
    return partitioned_;
  }

  /// Tells whether a microbatch may be overtaken within its forward phase: it
  /// waits there for another rank, an owner or a peer of a shared module.
  bool overlaps() const noexcept {
    return ranks_ > 1;
  }

  /// Tells whether calls of a module on this rank wait for their turn.
  bool keeps_order(module_id x) const;

  rank_id owner(module_id x) const {
    return owners_.at(x.value);
  }

  /// The first of the modules that hold a tensor: it gets the requests.
  module_id home(uint32_t tensor) const {
    return module_id{model_.tensors.at(tensor).modules.front()};
  }

  /// @param x position in `model().tensors`
  rank_id tensor_owner(uint32_t x) const {
    // Modules that share a tensor are one node, so any of them tells (R18).
    return owner(home(x));
  }

  bool owned(uint32_t tensor) const {
    return tensor_owner(tensor) == self_;
  }

  const std::string& name(module_id x) const {
    return model_.modules.at(x.value).names.front();
  }

  /// What stands for a module in the paths of random numbers (R23); 0 if it
  /// draws none.
  uint64_t stream_of(module_id x) const {
    return streams_.at(x.value);
  }

  /// Whether backward computes a module again.
  const recomputation& recomputed(module_id x) const {
    return recomputed_.at(x.value);
  }

  /// Tells whether tensor-parallel ranks compute a module together.
  bool is_shared(module_id x) const {
    return any_shared() && shared_.contains(x);
  }

  bool any_shared() const noexcept {
    return !shared_.empty();
  }

  /// How they do, on the ranks that own it; else null.
  const distributed_module* shared(module_id x) const {
    auto i = shared_.find(x);
    return i == shared_.end() ? nullptr : i->second.get();
  }

  /// What this rank holds of a tensor that it owns together with others; null:
  /// the whole.
  const tensor_slice* slice(uint32_t tensor) const {
    auto i = slices_.find(tensor);
    return i == slices_.end() ? nullptr : &i->second;
  }

  /// Tells whether the gradient of a slice is one of as many batches as there
  /// are peers (paper, `is_scaled_batch_parameter`).
  bool is_scaled_batch(uint32_t tensor) const {
    return slices_.contains(tensor) && !one_batch_.contains(tensor);
  }

  const std::string& tensor_name(uint32_t x) const {
    return model_.tensors.at(x).names.front();
  }

  /// Tells whether the bytes of `x` are those of a parameter or buffer of this
  /// rank, which another microbatch may write (R13).
  bool shares_state(const at::Tensor& x) const;

  // -- changes ----------------------------------------------------------------

  /// The user may have added modules.
  /// @param declared why modules are stateful, as the user said, by object
  void replace(walked_model x,
               const std::map<const void*, std::string>& declared);

  /// @param owners by module
  void place(std::vector<rank_id> owners) {
    owners_ = std::move(owners);
  }

  /// Each call of a module with state counts in the paths of random numbers,
  /// then, which tell which state it found.
  /// @param xs by module
  void recompute(std::vector<recomputation> xs);

  /// Tensor-parallel ranks share these modules. Each of their calls counts in
  /// the paths of random numbers, which name what they exchange.
  void share(const std::vector<module_id>& modules);

  /// Ranks compute the modules together that have these tensors, by their own
  /// code: each of their calls counts in paths, as above.
  void compute_together(const std::vector<uint32_t>& tensors);

  /// This rank holds a slice of a tensor.
  void cut(uint32_t tensor, const tensor_slice& slice) {
    slices_.emplace(tensor, slice);
  }

  /// The gradient of a slice is one of the only batch that peers have.
  void count_once(uint32_t tensor) {
    one_batch_.insert(tensor);
  }

  /// @param x how this rank computes its part
  /// @param slices what it holds of the module's tensors
  void share(module_id module, std::unique_ptr<distributed_module> x,
             const std::map<uint32_t, tensor_slice>& slices);

  /// Nothing is shared any more, and no tensor is cut.
  void unshare() {
    shared_.clear();
    slices_.clear();
    one_batch_.clear();
  }

  /// What is owned has its bytes now: requests may come.
  void finish_partition();

  /// A module put another tensor into the slot of a buffer: it is the same
  /// buffer from now on.
  void rebind(const at::Tensor& from, const at::Tensor& to);

  module_order& order() noexcept {
    return order_;
  }

private:
  rank_id self_;
  size_t ranks_;
  walked_model model_;
  module_order order_;
  bool partitioned_ = false;
  std::vector<rank_id> owners_;              // by module
  std::vector<uint64_t> streams_;            // by module
  std::vector<recomputation> recomputed_;    // by module
  std::unordered_set<const void*> storages_; // of owned tensors
  std::map<module_id, std::unique_ptr<distributed_module>> shared_;
  std::map<uint32_t, tensor_slice> slices_; // of owned tensors
  std::unordered_set<uint32_t> one_batch_;  // of those
};

/// All that calls of modules change of a map.
class map_changes {
public:
  /// @param x outlives this
  explicit map_changes(model_map& x) : map_(x) {
    // nop
  }

  const model_map& map() const noexcept {
    return map_;
  }

  /// See `model_map::rebind`.
  void rebind(const at::Tensor& from, const at::Tensor& to) {
    map_.rebind(from, to);
  }

  /// See `module_order::may_change`.
  bool may_change(uint32_t tensor, step_id s) {
    return map_.order().may_change(tensor, s);
  }

  /// See `module_order::note_change`.
  void note_change(uint32_t tensor, bool changed) {
    map_.order().note_change(tensor, changed);
  }

private:
  model_map& map_;
};

} // namespace smp
