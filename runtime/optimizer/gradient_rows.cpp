#include "runtime/optimizer/gradient_rows.hpp"

#include <ATen/ops/sparse_coo_tensor.h>

namespace smp {

at::Tensor rows_of(const at::Tensor& x, int64_t begin, int64_t end) {
  auto result = x.detach();
  return result.dim() == 0 ? result : result.narrow(0, begin, end - begin);
}

at::Tensor rows_of_gradient(const at::Tensor& x, int64_t begin, int64_t end) {
  if (!x.is_sparse())
    return rows_of(x, begin, end);
  auto all = x.coalesce();
  auto row = all.indices()[0];
  auto mine = row.ge(begin).logical_and(row.lt(end));
  auto chosen = mine.nonzero().squeeze(1);
  auto indices = all.indices().index_select(1, chosen);
  indices[0].sub_(begin);
  auto sizes = x.sizes().vec();
  sizes[0] = end - begin;
  return at::sparse_coo_tensor(indices, all.values().index_select(0, chosen),
                               sizes)
    .coalesce();
}

} // namespace smp
