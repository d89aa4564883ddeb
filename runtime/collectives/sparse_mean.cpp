#include "runtime/collectives/sparse_mean.hpp"

#include "runtime/base/rank_context.hpp"
#include "runtime/values/tensor_bridge.hpp"
#include "transport/bytes.hpp"
#include "transport/exchange.hpp"

#include <ATen/ops/cat.h>
#include <ATen/ops/sparse_coo_tensor.h>

#include <vector>

namespace smp {

at::Tensor mean_of_sparse(const rank_context& rank, const comm_group& over,
                          const at::Tensor& gradient, at::IntArrayRef sizes) {
  using part = std::vector<tensor_ref>; // indices and values, or nothing
  part mine;
  if (gradient.defined()) {
    auto own = gradient.is_sparse() ? gradient.coalesce()
                                    : gradient.to_sparse(1).coalesce();
    mine = {to_tensor_ref(own.indices(), true),
            to_tensor_ref(own.values(), true)};
  }
  auto ranks = rank.layout().members(over, rank.self());
  std::vector<at::Tensor> indices;
  std::vector<at::Tensor> values;
  for (auto& x : rank.exchange().all_gather(ranks, "smp.sparse_gradient",
                                            to_payload(mine))) {
    auto theirs = from_payload<part>(x, "sparse gradient");
    if (theirs.size() != 2)
      continue;
    indices.push_back(to_tensor(theirs[0]));
    values.push_back(to_tensor(theirs[1]));
  }
  if (indices.empty())
    return {};
  auto sum = at::sparse_coo_tensor(at::cat(indices, 1), at::cat(values), sizes)
               .coalesce();
  return sum.div(static_cast<double>(ranks.size()));
}

} // namespace smp
