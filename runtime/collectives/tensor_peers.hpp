#pragma once

#include "actors/protocol/rank_view.hpp"
#include "tp/tensor_group.hpp"

namespace smp {

class rank_context;

/// The tensor-parallel group of a rank, for the modules that it shares.
/// Exchanges between peers are named by the path of the call (R23), which is
/// the same on all peers wherever and whenever they run it.
class tensor_peers final : public tensor_group {
public:
  /// @param rank outlives this
  explicit tensor_peers(const rank_context& rank) : rank_(rank) {
    // nop
  }

  uint64_t size() const override;

  uint64_t rank() const override;

  bool same_samples() const override;

  std::string next_name() override;

  entered_tensors* entered() override;

  void draw_as(uint64_t peer, const std::vector<std::string>& calls,
               const std::function<void()>& f) override;

  pending begin_allreduce(const at::Tensor& x,
                          const std::string& name) override;

  pending begin_allgather(const at::Tensor& x,
                          const std::string& name) override;

  pending begin_reduce_scatter(const at::Tensor& x,
                               const std::string& name) override;

  pending begin_all_to_all(const at::Tensor& x,
                           const std::string& name) override;

  at::Tensor exchange_rows(const at::Tensor& x,
                           const std::vector<int64_t>& given,
                           const std::vector<int64_t>& taken,
                           const std::string& name) override;

  // -- for who looks ----------------------------------------------------------

  /// @param step the running step, or the last one
  /// @returns this rank's calls of shared modules in it. Any thread.
  std::vector<shared_calls> calls(step_id step) const;

private:
  const rank_context& rank_;
};

} // namespace smp
