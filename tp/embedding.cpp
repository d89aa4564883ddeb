#include "tp/embedding.hpp"

#include "tp/functions.hpp"

#include <ATen/ops/embedding.h>

#include <utility>

namespace smp::nn {

namespace {

class distributed_embedding final : public distributed_module {
public:
  explicit distributed_embedding(const native_module& x)
    : weight_(x.parameters.at("weight")),
      padding_idx_(x.padding_idx.value_or(-1)),
      sparse_(x.sparse) {
    // nop
  }

  at::Tensor forward(const at::Tensor& x) const override {
    auto all = fused_allgather_for_tp(x, 0);
    auto mine = at::embedding(weight_, all, padding_idx_, false, sparse_);
    return scatter_and_merge_for_tp(mine, 0, -1);
  }

private:
  at::Tensor weight_;
  int64_t padding_idx_;
  bool sparse_;
};

std::string refusal_of_embedding(const native_module& x, int64_t peers) {
  if (x.max_norm)
    return "max_norm changes whole rows, of which no rank has one";
  if (x.scale_grad_by_freq)
    return "scale_grad_by_freq would count the samples of other ranks";
  auto channels = x.parameters.at("weight").size(1);
  if (channels % peers == 0)
    return {};
  return "its " + std::to_string(channels)
         + " channels cannot be divided among " + std::to_string(peers)
         + " ranks";
}

std::map<std::string, tensor_slice>
slices_of_embedding(const native_module& x, int64_t rank, int64_t peers) {
  auto& weight = x.parameters.at("weight");
  auto channels = weight.size(1) / peers;
  return {{"weight", {1, rank * channels, channels, weight.sizes().vec()}}};
}

std::unique_ptr<distributed_module> make_embedding(const native_module& x) {
  return std::make_unique<distributed_embedding>(x);
}

} // namespace

const distribution embedding_distribution{"Embedding", refusal_of_embedding,
                                          slices_of_embedding, make_embedding};

} // namespace smp::nn
