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
  /// rank, are recomputed together; 0: not recomputed.
  uint32_t region = 0;
  /// Recomputes with the random numbers of the first run.
  bool same_numbers = true;
};

/// Which rank owns each module and tensor of a model. Without a partition this
/// rank owns everything.
class model_map {
public:
  /// @param ranks number of ranks that run a step together: those of the
  /// pipeline, and all that share modules with it
  model_map(rank_id self, size_t ranks, walked_model model);

  rank_id self() const noexcept {
    return self_;
  }

  const walked_model& model() const noexcept {
    return model_;
  }

  /// The modules that microbatches must pass in order (R19).
  const module_order& order() const noexcept {
    return order_;
  }

  /// Tells whether owners are known: calls of modules may be remote then.
  bool partitioned() const noexcept {
    return partitioned_;
  }

  /// Tells whether a microbatch may be overtaken within its forward phase,
  /// while it waits for another rank: an owner or a peer of a shared module.
  bool overlaps() const noexcept {
    return ranks_ > 1;
  }

  /// Tells whether backward computes any module again.
  bool recomputes() const noexcept;

  /// Tells whether it matters when a call changes state: another microbatch may
  /// come before it, or it may come a second time.
  bool sees_state_again() const noexcept {
    return overlaps() || recomputes();
  }

  /// Tells whether calls of a module on this rank wait for their turn.
  bool keeps_order(module_id x) const;

  rank_id owner(module_id x) const {
    return owners_.at(x.value);
  }

  /// The first module that holds a tensor: it gets the requests.
  module_id home(uint32_t tensor) const {
    return module_id{model_.tensors.at(tensor).modules.front()};
  }

  /// @param x position in `model().tensors`
  rank_id tensor_owner(uint32_t x) const {
    // Modules that share a tensor are one node, so any has the owner (R18).
    return owner(home(x));
  }

  bool owned(uint32_t tensor) const {
    return tensor_owner(tensor) == self_;
  }

  const std::string& name(module_id x) const {
    return model_.modules.at(x.value).names.front();
  }

  /// The number of a module in the paths of random numbers (R23);
  /// 0 if it draws none.
  uint64_t stream_of(module_id x) const {
    return streams_.at(x.value);
  }

  /// Whether and how backward recomputes a module.
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

  /// Tells whether a module that ranks share has the parameter.
  bool is_of_shared(uint32_t tensor) const;

  /// How they compute it, on the ranks that own it; else null.
  const distributed_module* shared(module_id x) const {
    auto i = shared_.find(x);
    return i == shared_.end() ? nullptr : i->second.get();
  }

  /// The slice that this rank holds of a tensor that it owns together with
  /// others; null: it holds the whole tensor.
  const tensor_slice* slice(uint32_t tensor) const {
    auto i = slices_.find(tensor);
    return i == slices_.end() ? nullptr : &i->second;
  }

  /// Tells whether the gradient of a slice covers as many batches as there are
  /// peers (paper, `is_scaled_batch_parameter`).
  bool is_scaled_batch(uint32_t tensor) const {
    return slices_.contains(tensor) && !one_batch_.contains(tensor);
  }

  const std::string& tensor_name(uint32_t x) const {
    return model_.tensors.at(x).names.front();
  }

  /// Tells whether `x` shares the bytes of a parameter or buffer of this rank,
  /// which another microbatch may write (R13).
  bool shares_state(const at::Tensor& x) const;

  // -- changes ----------------------------------------------------------------

  /// Replaces the walk, as the user may have added modules.
  /// @param declared why the user declared modules stateful, by object
  void replace(walked_model x,
               const std::map<const void*, std::string>& declared);

  /// @param owners by module
  void place(std::vector<rank_id> owners) {
    owners_ = std::move(owners);
  }

  /// From then on each call of a module with state counts in the paths of
  /// random numbers, which identify the state that it found.
  /// @param xs by module
  void recompute(std::vector<recomputation> xs);

  /// See `module_order::order_again`.
  void order_again(const std::set<uint32_t>& tensors);

  /// Marks modules that tensor-parallel ranks share. Each of their calls counts
  /// in the paths of random numbers, which identify what the ranks exchange.
  void share(const std::vector<module_id>& modules);

  /// Marks the modules of these tensors, which ranks compute together by the
  /// modules' own code: each of their calls counts in paths, as above.
  void compute_together(const std::vector<uint32_t>& tensors);

  /// Records that this rank holds only a slice of a tensor.
  void cut(uint32_t tensor, const tensor_slice& slice) {
    slices_.emplace(tensor, slice);
  }

  /// Records that a slice's gradient covers one batch, that of all peers.
  void count_once(uint32_t tensor) {
    one_batch_.insert(tensor);
  }

  /// @param x computes this rank's part
  /// @param slices the parts that it holds of the module's tensors
  void share(module_id module, std::unique_ptr<distributed_module> x,
             const std::map<uint32_t, tensor_slice>& slices);

  /// Nothing is shared any more, and no tensor is cut.
  void unshare() {
    shared_.clear();
    slices_.clear();
    one_batch_.clear();
  }

  /// Owned tensors have their bytes now: requests may arrive.
  void finish_partition();

  /// Records that a module put another tensor into the slot of a buffer: from
  /// now on that tensor is the buffer.
  void rebind(const at::Tensor& from, const at::Tensor& to);

  module_order& order() noexcept {
    return order_;
  }

private:
  void number_state();

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

/// The changes to a map that calls of modules may make.
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

  /// See `module_order::take_late_state`.
  std::map<uint32_t, std::string> take_late_state() {
    return map_.order().take_late_state();
  }

  /// See `module_order::note_late_state`.
  void note_late_state(module_id module, std::string reason) {
    map_.order().note_late_state(static_cast<uint32_t>(module.value),
                                 std::move(reason));
  }

private:
  model_map& map_;
};

} // namespace smp
