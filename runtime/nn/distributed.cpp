#include "runtime/nn/distributed.hpp"

#include "runtime/nn/sizes.hpp"
#include "transport/error.hpp"

#include <torch/nn/init.h>

#include <fmt/format.h>

namespace smp::nn {

namespace {

void validate(const embedding_arguments& x) {
  auto refuse = [](const char* name, auto found, const char* allowed) {
    throw config_error(fmt::format("embedding_arguments: {} = {}; allowed: {}",
                                   name, found, allowed));
  };
  require_positive("num_embeddings", x.num_embeddings);
  require_positive("embedding_dim", x.embedding_dim);
  if (auto i = x.padding_idx.value_or(0); i < 0 || i >= x.num_embeddings)
    refuse("padding_idx", i, "a row of the table");
  if (!(x.initializer_range >= 0))
    refuse("initializer_range", x.initializer_range, "0 or more");
}

torch::nn::EmbeddingOptions torch_options(const embedding_arguments& x) {
  validate(x);
  auto weight = torch::empty({x.num_embeddings, x.embedding_dim});
  torch::nn::init::normal_(weight, 0, x.initializer_range);
  if (x.padding_idx)
    weight[*x.padding_idx].zero_();
  torch::nn::EmbeddingOptions result(x.num_embeddings, x.embedding_dim);
  result.padding_idx(x.padding_idx).max_norm(x.max_norm);
  result.norm_type(x.norm_type).sparse(x.sparse);
  return result.scale_grad_by_freq(x.scale_grad_by_freq)._weight(weight);
}

} // namespace

distributed_embedding::distributed_embedding(embedding_arguments x)
  : distributed(torch_options(x)) {
  // nop
}

} // namespace smp::nn
