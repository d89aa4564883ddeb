#pragma once

#include "tp/entered_tensors.hpp"
#include "tp/tensor_group.hpp"

namespace smp {

/// A tensor group without real peers: it measures, in one process, what the
/// first of the ranks that share modules keeps. Every peer is assumed to hold
/// what this rank holds and to send what this rank sends. Of the resulting
/// values, only the sizes are right.
class assumed_peers final : public tensor_group {
public:
  /// @param size number of ranks, this one included
  assumed_peers(uint64_t size, bool same_samples)
    : size_(size), same_samples_(same_samples) {
    // nop
  }

  uint64_t size() const override {
    return size_;
  }

  uint64_t rank() const override {
    return 0;
  }

  bool same_samples() const override {
    return same_samples_;
  }

  std::string next_name() override {
    return {};
  }

  entered_tensors* entered() override {
    return &entered_;
  }

  void draw_as(uint64_t, const std::vector<std::string>&,
               const std::function<void()>& f) override {
    f();
  }

  pending begin_allreduce(const at::Tensor& x, const std::string&) override;

  pending begin_allgather(const at::Tensor& x, const std::string&) override;

  pending begin_reduce_scatter(const at::Tensor& x,
                               const std::string&) override;

  pending begin_all_to_all(const at::Tensor& x, const std::string&) override;

  /// Rows from peers are zeros.
  at::Tensor exchange_rows(const at::Tensor& x, const std::vector<int64_t>&,
                           const std::vector<int64_t>& taken,
                           const std::string&) override;

private:
  at::Tensor of_all(const at::Tensor& x) const;
  at::Tensor sum_of_all(const at::Tensor& x) const;

  uint64_t size_;
  bool same_samples_;
  entered_tensors entered_;
};

} // namespace smp
