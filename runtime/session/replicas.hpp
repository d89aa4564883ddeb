#pragma once

#include "partition/rank_layout.hpp"
#include "transport/error.hpp"
#include "transport/ids.hpp"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace smp {

class model_map;
class rank_context;

/// What ties the replicas of a model together (paper, section 3.2): each runs a
/// step in a pipeline of its own, on data of its own, and at its end the ranks
/// that hold the same modules, a data-parallel group, average the gradients
/// that the step changed. A group of one does nothing.
class replicas {
public:
  /// @param rank outlives this
  explicit replicas(const rank_context& rank) : rank_(rank) {
    // nop
  }

  /// Remembers what the gradients of owned parameters are.
  void begin_step(const model_map& map);

  /// Hears how the step ended elsewhere, and averages if it succeeded: of
  /// sparse gradients those of the rows that anybody has, of parameters that
  /// some replicas did not use as if their gradient were zero. Collective over
  /// the data-parallel group.
  /// @param mine how the step ended on this rank
  /// @returns why it failed, here or elsewhere; nothing if it succeeded
  failure end_step(const model_map* map, const failure& mine);

  /// What a session does not survive; others hear of it by themselves.
  static bool ends_session(const failure& x);

private:
  /// By what one notices that a gradient was changed or replaced.
  struct mark {
    const void* gradient = nullptr;
    uint64_t version = 0;

    bool operator==(const mark&) const = default;
  };

  static mark mark_of(const at::Tensor& parameter);
  static bool trains(const model_map& map, uint32_t tensor);

  std::vector<uint32_t> changed(const model_map& map) const;
  /// @param over the ranks that hold the same of them
  void average(const std::vector<at::Tensor>& parameters,
               const comm_group& over) const;
  void average_sparse(const at::Tensor& parameter,
                      const comm_group& over) const;

  /// The ranks that hold the same modules.
  std::vector<rank_id> group() const;

  const rank_context& rank_;
  std::vector<mark> marks_; // by position in the model's tensors
};

} // namespace smp
