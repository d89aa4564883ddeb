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

/// Input of `cut_rows` for one parameter: rows along its first axis.
struct row_block {
  int64_t rows = 1;
  uint64_t row_bytes = 0;
};

/// By parameter: where the rows of each rank begin, followed by the number of
/// rows.
using row_begins = std::vector<std::vector<int64_t>>;

/// Distributes parameters over ranks, in order, so that each gets about the
/// same number of bytes: at most half a row is off at each boundary.
row_begins cut_rows(const std::vector<row_block>& blocks, uint64_t ranks);

/// Replicas share the work of an optimizer (ZeRO stage 1, Rajbhandari et al.
/// 2020; `smp.shard_optimizer_state`): each updates some rows of the parameters
/// and has state only for these; then all ranks exchange the results.
/// Optimizers treat each element by itself, so the numbers do not change. For a
/// parameter that tensor-parallel ranks share, the ranks that hold the same
/// slice share its rows.
class optimizer_shards {
public:
  /// The part of a parameter that this rank updates.
  struct part {
    at::Tensor parameter;
    /// A view of its rows, which the optimizer treats as a parameter.
    at::Tensor rows;
    /// Where they are in the parameter, or in this rank's slice of it.
    tensor_slice where;
  };

  /// @param rank outlives this
  explicit optimizer_shards(const rank_context& rank) : rank_(rank) {
    // nop
  }

  /// Detaches the parameters from transfers that arrive later.
  ~optimizer_shards();

  optimizer_shards(const optimizer_shards&) = delete;
  optimizer_shards& operator=(const optimizer_shards&) = delete;

  /// Replaces the parameters in the groups of `x` by parts of them; a no-op if
  /// there is one replica.
  /// @pre the model is partitioned and `x` has the parameters of this rank
  /// @throws error (config) for an optimizer that needs whole parameters
  void cut(torch::optim::Optimizer& x, const model_map& map);

  /// Gives the optimizer the gradients of its rows.
  void begin_update();

  /// Sends the updated rows to the other replicas. Theirs arrive while this
  /// rank continues: code that touches such a parameter waits (R61), unless
  /// `smp.overlapping_allreduce` is off. Collective over the replicas.
  void end_update();

  /// Waits until the last update has arrived completely.
  void await_updates();

  /// Cancels the update that began.
  void drop_parts();

  /// Drops the gradients of all parameters that were cut.
  void zero_grad();

  /// @param x a parameter, or this rank's rows of it
  /// @returns this rank's part; null if there is none
  const part* find(const at::Tensor& x) const;

  /// Which rank updates which rows of a parameter.
  struct owners {
    at::Tensor parameter;
    comm_group over = comm_group::dp;
    /// By rank of the group: where its rows begin; then the number of rows.
    std::vector<int64_t> begins;
    /// A view of this rank's rows; undefined: it has none.
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
    /// The ranks with the same values: all replicas, or those with this slice.
    comm_group over = comm_group::dp;
    std::vector<int64_t> begins; // see `cut_rows`
    /// Rows that other ranks updated, in flight to this rank.
    std::vector<transfer_ptr> missing = {};
  };

  /// All parameters of the optimizer, in its order, the same on all replicas.
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
