#include "tp/distributed_module.hpp"

#include "transport/error.hpp"

#include <ATen/ops/cat.h>

namespace smp {

at::Tensor tensor_slice::of(const at::Tensor& x) const {
  if (blocks == 1)
    return x.narrow(dim, begin, length);
  return x.unflatten(dim, {blocks, -1})
    .narrow(dim + 1, begin, length)
    .flatten(dim, dim + 1);
}

at::Tensor tensor_slice::merged(const std::vector<at::Tensor>& parts) const {
  if (blocks == 1)
    return at::cat(parts, dim);
  std::vector<at::Tensor> xs;
  for (auto& x : parts)
    xs.push_back(x.unflatten(dim, {blocks, -1}));
  return at::cat(xs, dim + 1).flatten(dim, dim + 1);
}

std::vector<tensor_slice> tensor_slice::ranges() const {
  auto size = whole.at(static_cast<size_t>(dim)) / blocks;
  std::vector<tensor_slice> result;
  for (int64_t i = 0; i < blocks; ++i)
    result.push_back({dim, i * size + begin, length, whole});
  return result;
}

distributed_module::~distributed_module() = default;

std::vector<at::Tensor>
distributed_module::forward_in_row(std::span<const at::Tensor> xs,
                                   const row_place&) const {
  return forward(xs);
}

const at::Tensor& only_tensor(const std::string& module,
                              std::span<const at::Tensor> xs) {
  if (xs.size() != 1)
    throw error{error_code::user_code,
                "'" + module + "' is shared as a module of one tensor, but got "
                  + std::to_string(xs.size())
                  + ": give smp::tp_register a forward_hook that makes one of "
                    "them, or do not share it"};
  return xs[0];
}

} // namespace smp
