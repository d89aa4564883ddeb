#pragma once

#include "runtime/session/comm_hook.hpp"
#include "runtime/session/optimizer_shards.hpp"
#include "runtime/session/tensor_collectives.hpp"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <deque>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace smp {

class rank_context;

/// The part of the gradients that a replica keeps (ZeRO stage 2, Rajbhandari et
/// al. 2020; `smp.shard_gradients`): that of the rows which it updates. What a
/// bucket holds goes to the owners, as often as it is full, and its memory is
/// free as soon as it is there.
class gradient_shards {
public:
  /// @param rank outlives this
  explicit gradient_shards(const rank_context& rank) : rank_(rank) {
    // nop
  }

  /// Tells who updates what; more than once if there are more optimizers.
  void add(const std::vector<optimizer_shards::owners>& xs);

  /// Tells whether the gradient of a parameter is kept in parts.
  bool has(const at::Tensor& parameter) const {
    return by_parameter_.contains(parameter.unsafeGetTensorImpl());
  }

  bool empty() const noexcept {
    return shares_.empty();
  }

  // -- one step ---------------------------------------------------------------

  /// Sends gradients to the owners of their rows. In any order of names; those
  /// of one name meet in their order.
  /// @param memory gradients of `parameters`, one after the other
  void begin(const std::vector<at::Tensor>& parameters, at::Tensor memory,
             comm_hook hook, const comm_group& over, const std::string& name);

  /// Takes what came.
  /// @param all waits for what is on its way
  void collect(bool all);

  /// Keeps the rows of this rank, and drops the rest.
  /// @param gradient the mean of all replicas, or undefined
  void take(const at::Tensor& parameter, const at::Tensor& gradient);

  /// What came becomes part of the gradients, or counts for nothing.
  /// @param changed parameters for which any replica has a gradient
  void end_step(const std::set<const void*>& changed);
  void drop();

  // -- what there is ----------------------------------------------------------

  /// That of the rows of this rank, which no other rank has; undefined if there
  /// is none.
  at::Tensor of_rows(const at::Tensor& parameter) const;

  /// The gradient of all rows. Collective over the replicas that share it.
  /// @returns undefined if there is none
  at::Tensor whole(const at::Tensor& parameter) const;

  /// Sums that are on their way, and bytes that wait for them.
  uint64_t under_way() const;
  uint64_t bytes_under_way() const;

  /// Bytes of gradients that are here: in rows, and on their way.
  uint64_t bytes() const;

private:
  struct share {
    optimizer_shards::owners owners;
    int64_t begin = 0; // of this rank
    int64_t end = 0;
    at::Tensor sum; // of the step, of these rows
  };

  /// Rows of one owner that lie next to each other.
  struct piece {
    at::Tensor input;
    std::vector<std::pair<share*, int64_t>> mine; // and how many elements
    tensor_future done;
  };

  struct round {
    at::Tensor memory;
    std::vector<piece> pieces;
  };

  share* find(const at::Tensor& parameter) const;
  void finish(round& x);

  const rank_context& rank_;
  std::deque<share> shares_; // in the order of the optimizers
  std::map<const void*, share*> by_parameter_;
  std::deque<round> under_way_;
};

} // namespace smp
