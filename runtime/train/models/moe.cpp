#include "runtime/train/models/moe.hpp"

#include "runtime/nn/sizes.hpp"

namespace smp {

// -- the mixture --------------------------------------------------------------

moe_expert_impl::moe_expert_impl(const model_sizes& x) : dropout(x.dropout) {
  const auto inner = inner_width(x);
  wi = make_linear(x.width, inner, gpt_weight_std, false);
  wo = make_linear(inner, x.width, gpt_residual_std(x), false);
  register_module("wi", wi);
  register_module("dropout", dropout);
  register_module("wo", wo);
}

torch::Tensor moe_expert_impl::forward(torch::Tensor x) {
  return wo(dropout(torch::relu(wi(x))));
}

moe_router_impl::moe_router_impl(const model_sizes& x)
  : classifier(make_linear(x.width, x.experts, gpt_weight_std, false)) {
  register_module("classifier", classifier);
}

torch::Tensor moe_router_impl::forward(torch::Tensor x) {
  return torch::softmax(classifier(x), -1);
}

moe_mlp_impl::moe_mlp_impl(const model_sizes& x) : router(x) {
  register_module("router", router);
  std::vector<std::pair<std::string, std::shared_ptr<torch::nn::Module>>> named;
  for (int64_t i = 0; i < x.experts; ++i) {
    by_index.emplace_back(x);
    named.emplace_back(fmt::format("expert_{}", i), by_index.back().ptr());
  }
  experts->update(named);
  register_module("experts", experts);
}

std::tuple<torch::Tensor, torch::Tensor>
moe_mlp_impl::forward(torch::Tensor x) {
  auto tokens = x.flatten(0, 1);
  auto probabilities = router(tokens);
  auto [chosen, index] = probabilities.max(-1);
  auto result = torch::zeros_like(tokens);
  std::vector<double> shares;
  for (size_t i = 0; i < by_index.size(); ++i) {
    auto mine = index.eq(static_cast<int64_t>(i)).nonzero().squeeze(1);
    shares.push_back(static_cast<double>(mine.numel())
                     / static_cast<double>(index.numel()));
    if (mine.numel() > 0)
      result = result.index_copy(0, mine,
                                 by_index[i](tokens.index_select(0, mine)));
  }
  // Shares have no gradient: that of the probabilities balances the experts.
  auto of_all = torch::tensor(shares, torch::kFloat).to(x.device());
  auto imbalance = (of_all * probabilities.mean(0)).sum()
                   * static_cast<double>(by_index.size());
  return {(chosen.unsqueeze(-1) * result).view(x.sizes()), imbalance};
}

// -- the model ----------------------------------------------------------------

moe_block_impl::moe_block_impl(const model_sizes& x, int64_t index)
  : ln_1(norm_options(x)),
    attn(x, index),
    ln_2(norm_options(x)),
    mlp(x),
    drop(x.dropout) {
  register_module("ln_1", ln_1);
  register_module("attn", attn);
  register_module("ln_2", ln_2);
  register_module("mlp", mlp);
  register_module("drop", drop);
}

std::tuple<torch::Tensor, torch::Tensor>
moe_block_impl::forward(std::tuple<torch::Tensor, torch::Tensor> input) {
  auto [x, imbalance] = input;
  x = x + attn(ln_1(x));
  auto [y, mine] = mlp(ln_2(x));
  return {x + drop(y), imbalance + mine};
}

std::tuple<torch::Tensor, torch::Tensor>
moe_transformer_impl::forward(torch::Tensor tokens) {
  using states = std::tuple<torch::Tensor, torch::Tensor>;
  auto none = torch::zeros({}, torch::TensorOptions{}.device(tokens.device()));
  auto [y, imbalance] = h->forward<states>(states{embedded(tokens), none});
  return {ln_f(y), imbalance / static_cast<double>(h->size())};
}

moe_impl::moe_impl(const model_sizes& x) {
  require_transformer(x);
  require_positive("model.experts", x.experts);
  transformer = submodule<moe_transformer>(x);
  auto weight = x.tied ? transformer->wte->weight
                       : normal_tensor({x.vocabulary, x.width}, gpt_weight_std);
  register_module("transformer", transformer);
  lm_head.emplace(*this, weight, x.loss_in_head);
}

std::tuple<torch::Tensor, torch::Tensor>
moe_impl::forward(torch::Tensor tokens) {
  auto [x, imbalance] = transformer(tokens);
  return {lm_head->logits(x), imbalance};
}

std::tuple<torch::Tensor, torch::Tensor> moe_impl::loss(torch::Tensor tokens,
                                                        torch::Tensor targets) {
  auto [x, imbalance] = transformer(tokens);
  return {lm_head->loss(x, targets), imbalance};
}

} // namespace smp
