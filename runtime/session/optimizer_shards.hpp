#pragma once

#include "partition/rank_layout.hpp"
#include "tp/distributed_module.hpp"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace torch::optim {
class Optimizer;
} // namespace torch::optim

namespace smp {

class model_map;
class rank_context;

/// What `cut_rows` knows of a parameter: rows along its first axis.
struct row_block {
  int64_t rows = 1;
  uint64_t row_bytes = 0;
};

/// By parameter, where the rows of each rank begin, and then the number of
/// rows.
using row_begins = std::vector<std::vector<int64_t>>;

/// Deals out parameters among ranks, in order, so that each gets about as many
/// bytes as the others: no more than half a row is given to the wrong one.
row_begins cut_rows(const std::vector<row_block>& blocks, uint64_t ranks);

/// Replicas share the work of an optimizer (ZeRO stage 1, Rajbhandari et al.
/// 2020; `smp.shard_optimizer_state`): each updates some rows of the
/// parameters, and has state for these only; then all hear of all. As
/// optimizers look at one element at a time, the numbers stay what they were.
/// Of what tensor-parallel ranks share, each has a slice, of which those that
/// have the same one share the rows.
class optimizer_shards {
public:
  /// What this rank updates of a parameter.
  struct part {
    at::Tensor parameter;
    /// A view of its rows, which the optimizer takes for a parameter.
    at::Tensor rows;
    /// Where they are in the parameter, of which this rank may have a slice.
    tensor_slice where;
  };

  /// @param rank outlives this
  explicit optimizer_shards(const rank_context& rank) : rank_(rank) {
    // nop
  }

  /// What comes later is nobody's any more.
  ~optimizer_shards();

  optimizer_shards(const optimizer_shards&) = delete;
  optimizer_shards& operator=(const optimizer_shards&) = delete;

  /// Replaces the parameters in the groups of `x` by parts of them; does
  /// nothing where there is one replica.
  /// @pre the model is partitioned and `x` has what this rank owns
  /// @throws error (config) for an optimizer that looks at all of a parameter
  void cut(torch::optim::Optimizer& x, const model_map& map);

  /// Shows the optimizer the gradients of its rows.
  void begin_update();

  /// Tells the other replicas what was updated. What they did comes while this
  /// rank goes on: who touches such a parameter waits for it (R61), unless
  /// `smp.overlapping_allreduce` is off. Collective over the replicas.
  void end_update();

  /// All of the last update is here.
  void await_updates();

  /// The update that began does not take place.
  void drop_parts();

  /// Drops the gradients of all parameters that were cut.
  void zero_grad();

  /// @param x a parameter, or its rows that this rank updates
  /// @returns that part; null if there is none
  const part* find(const at::Tensor& x) const;

  /// Who updates which rows of a parameter.
  struct owners {
    at::Tensor parameter;
    comm_group over = comm_group::dp;
    /// By rank of the group, where its rows begin, and then how many there are.
    std::vector<int64_t> begins;
    /// A view of those of this rank; undefined: it has none.
    at::Tensor rows;
  };

  std::vector<owners> all_owners() const;

  bool is_cut() const noexcept {
    return !cuts_.empty();
  }

private:
  struct transfer;
  using transfer_ptr = std::shared_ptr<transfer>;

  struct cut_parameter {
    at::Tensor parameter;
    std::string name;
    /// The ranks that hold the same: all replicas, or those with this slice.
    comm_group over = comm_group::dp;
    std::vector<int64_t> begins; // see `cut_rows`
    /// What others updated of it, on its way here.
    std::vector<transfer_ptr> missing = {};
  };

  /// All that the optimizer has, in its order, which is that of all replicas.
  void list_parameters(torch::optim::Optimizer& x, const model_map& map);
  void cut_among(const comm_group& over);
  void exchange(const comm_group& over, at::ScalarType type);
  void send(std::vector<cut_parameter*>& xs, const comm_group& over,
            uint64_t root);

  const rank_context& rank_;
  std::vector<cut_parameter> cuts_;
  std::vector<part> parts_;
  std::vector<transfer_ptr> under_way_;
};

} // namespace smp
