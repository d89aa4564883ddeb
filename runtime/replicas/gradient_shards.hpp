#pragma once

#include "runtime/collectives/tensor_collectives.hpp"
#include "runtime/optimizer/optimizer_shards.hpp"
#include "runtime/replicas/comm_hook.hpp"

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

/// The shard of the gradients that a replica keeps (ZeRO stage 2, Rajbhandari
/// et al. 2020; `smp.shard_gradients`): the rows that it updates. A bucket is
/// sent to the owners of its rows each time it is full, and its memory is free
/// as soon as they have it.
class gradient_shards {
public:
  /// @param rank outlives this
  explicit gradient_shards(const rank_context& rank) : rank_(rank) {
    // nop
  }

  /// Registers who updates which rows; called once per optimizer.
  void add(const std::vector<optimizer_shards::owners>& xs);

  /// Tells whether the gradient of a parameter is sharded.
  bool has(const at::Tensor& parameter) const {
    return by_parameter_.contains(parameter.unsafeGetTensorImpl());
  }

  bool empty() const noexcept {
    return shares_.empty();
  }

  // -- one step ---------------------------------------------------------------

  /// Sends gradients to the owners of their rows. Names may come in any order;
  /// calls of one name match in order.
  /// @param memory gradients of `parameters`, back to back
  void begin(const std::vector<at::Tensor>& parameters, at::Tensor memory,
             comm_hook hook, const comm_group& over, const std::string& name);

  /// Collects the sums that have arrived.
  /// @param all waits for those in flight
  void collect(bool all);

  /// Keeps this rank's rows of a gradient, and drops the rest.
  /// @param gradient the mean of all replicas, or undefined
  void take(const at::Tensor& parameter, const at::Tensor& gradient);

  /// Adds the collected sums to the gradients, or (`drop`) discards them.
  /// @param changed parameters for which any replica has a gradient
  void end_step(const std::set<const void*>& changed);
  void drop();

  // -- what there is ----------------------------------------------------------

  /// The gradient of this rank's rows, which no other rank has; undefined if
  /// there is none.
  at::Tensor of_rows(const at::Tensor& parameter) const;

  /// The gradient of all rows. Collective over the replicas that share it.
  /// @returns undefined if there is none
  at::Tensor whole(const at::Tensor& parameter) const;

  /// Number of sums in flight, and the bytes that wait for them.
  uint64_t under_way() const;
  uint64_t bytes_under_way() const;

  /// Bytes of gradients held here: own rows, and those in flight.
  uint64_t bytes() const;

private:
  struct share {
    optimizer_shards::owners owners;
    int64_t begin = 0; // of this rank
    int64_t end = 0;
    at::Tensor sum; // over the step, for these rows
  };

  /// Adjacent rows of one owner.
  struct piece {
    at::Tensor input;
    std::vector<std::pair<share*, int64_t>> mine; // and number of elements
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
