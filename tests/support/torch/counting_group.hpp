#pragma once

#include "tp/tensor_group.hpp"

#include <ATen/core/Tensor.h>

#include <functional>
#include <string>
#include <vector>

namespace smp::test {

/// Counts what one peer sends: of what is for all, to each other one; of a sum,
/// its part to each, and what comes of that back.
class counting_group final : public tensor_group {
public:
  /// @param entered what is known of tensors; null: nothing
  explicit counting_group(tensor_group& x, entered_tensors* entered = nullptr)
    : inner_(x), entered_(entered) {
    // nop
  }

  double bytes() const {
    return bytes_;
  }

  uint64_t size() const override {
    return inner_.size();
  }

  uint64_t rank() const override {
    return inner_.rank();
  }

  bool same_samples() const override {
    return inner_.same_samples();
  }

  std::string next_name() override {
    return inner_.next_name();
  }

  entered_tensors* entered() override {
    return entered_;
  }

  void draw_as(uint64_t peer, const std::vector<std::string>& calls,
               const std::function<void()>& f) override {
    inner_.draw_as(peer, calls, f);
  }

  pending begin_allreduce(const at::Tensor& x,
                          const std::string& name) override {
    bytes_ += 2 * others() / peers() * bytes_of(x);
    return inner_.begin_allreduce(x, name);
  }

  pending begin_allgather(const at::Tensor& x,
                          const std::string& name) override {
    bytes_ += others() * bytes_of(x);
    return inner_.begin_allgather(x, name);
  }

  pending begin_reduce_scatter(const at::Tensor& x,
                               const std::string& name) override {
    bytes_ += others() / peers() * bytes_of(x);
    return inner_.begin_reduce_scatter(x, name);
  }

  pending begin_all_to_all(const at::Tensor& x,
                           const std::string& name) override {
    bytes_ += others() / peers() * bytes_of(x);
    return inner_.begin_all_to_all(x, name);
  }

  at::Tensor exchange_rows(const at::Tensor& x,
                           const std::vector<int64_t>& given,
                           const std::vector<int64_t>& taken,
                           const std::string& name) override {
    return inner_.exchange_rows(x, given, taken, name);
  }

private:
  double peers() const {
    return static_cast<double>(size());
  }

  double others() const {
    return peers() - 1;
  }

  static double bytes_of(const at::Tensor& x) {
    return static_cast<double>(x.nbytes());
  }

  tensor_group& inner_;
  entered_tensors* entered_;
  double bytes_ = 0;
};

} // namespace smp::test
