#include "runtime/plan/assumed_peers.hpp"

#include <ATen/ops/stack.h>

#include <numeric>
#include <utility>

namespace smp {

namespace {

tensor_group::pending known_result(at::Tensor x) {
  return [x = std::move(x)] { return x; };
}

} // namespace

at::Tensor assumed_peers::of_all(const at::Tensor& x) const {
  return at::stack(std::vector<at::Tensor>(size_, x));
}

at::Tensor assumed_peers::sum_of_all(const at::Tensor& x) const {
  return x.mul(static_cast<int64_t>(size_));
}

tensor_group::pending assumed_peers::begin_allreduce(const at::Tensor& x,
                                                     const std::string&) {
  return known_result(sum_of_all(x));
}

tensor_group::pending assumed_peers::begin_allgather(const at::Tensor& x,
                                                     const std::string&) {
  return known_result(of_all(x));
}

tensor_group::pending assumed_peers::begin_reduce_scatter(const at::Tensor& x,
                                                          const std::string&) {
  return known_result(sum_of_all(x.select(0, 0)));
}

tensor_group::pending assumed_peers::begin_all_to_all(const at::Tensor& x,
                                                      const std::string&) {
  return known_result(of_all(x.select(0, 0)));
}

at::Tensor assumed_peers::exchange_rows(const at::Tensor& x,
                                        const std::vector<int64_t>&,
                                        const std::vector<int64_t>& taken,
                                        const std::string&) {
  auto sizes = x.sizes().vec();
  sizes.at(0) = std::accumulate(taken.begin(), taken.end(), int64_t{0});
  return x.new_zeros(sizes);
}

} // namespace smp
