#include "runtime/train/models/ncf.hpp"

#include "runtime/nn/sizes.hpp"

#include <torch/nn/init.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/dropout.h>

namespace smp {

namespace {

/// Width of the network's embeddings.
int64_t tower_width(const model_sizes& x) {
  require_positive("model.users", x.users);
  require_positive("model.items", x.items);
  require_positive("model.layers", x.layers);
  require_positive("model.width", x.width);
  require_probability("model.dropout", x.dropout);
  // Beyond that no memory would hold them.
  if (x.layers > 16)
    throw error{error_code::config,
                fmt::format("model.layers is {}, must be at most 16: each "
                            "layer of an ncf doubles its embeddings",
                            x.layers)};
  return x.width << (x.layers - 1);
}

} // namespace

ncf_impl::ncf_impl(const model_sizes& x)
  : embed_user_gmf(x.users, x.width),
    embed_item_gmf(x.items, x.width),
    embed_user_mlp(x.users, tower_width(x)),
    embed_item_mlp(x.items, tower_width(x)),
    predict_layer(2 * x.width, 1) {
  register_module("embed_user_GMF", embed_user_gmf);
  register_module("embed_item_GMF", embed_item_gmf);
  register_module("embed_user_MLP", embed_user_mlp);
  register_module("embed_item_MLP", embed_item_mlp);
  for (auto* table :
       {&embed_user_gmf, &embed_item_gmf, &embed_user_mlp, &embed_item_mlp})
    torch::nn::init::normal_((*table)->weight, 0, 0.01);
  for (auto in = 2 * tower_width(x); in > x.width; in /= 2) {
    torch::nn::Linear linear{in, in / 2};
    torch::nn::init::xavier_uniform_(linear->weight);
    torch::nn::init::zeros_(linear->bias);
    mlp_layers->push_back(torch::nn::Dropout(x.dropout));
    mlp_layers->push_back(linear);
    mlp_layers->push_back(torch::nn::ReLU());
  }
  register_module("MLP_layers", mlp_layers);
  torch::nn::init::xavier_uniform_(predict_layer->weight);
  torch::nn::init::zeros_(predict_layer->bias);
  register_module("predict_layer", predict_layer);
}

torch::Tensor ncf_impl::forward(torch::Tensor users, torch::Tensor items) {
  auto product = embed_user_gmf(users) * embed_item_gmf(items);
  auto pair = torch::cat({embed_user_mlp(users), embed_item_mlp(items)}, -1);
  auto network = mlp_layers->forward(pair);
  return predict_layer(torch::cat({product, network}, -1)).squeeze(-1);
}

} // namespace smp
