#pragma once

#include "partition/module_tree.hpp"

namespace smp::test {

/// The modules of a GPT in preorder, as the walk of the runtime finds them.
class gpt_tree {
public:
  gpt_tree(uint64_t layers, uint64_t width, bool tied) : width_(width) {
    add(0, "", "smp::gpt_impl");
    auto body = add(0, "transformer", "smp::gpt_transformer_impl");
    auto wte = add(body, "wte", "torch::nn::EmbeddingImpl", 256 * width);
    add(body, "wpe", "torch::nn::EmbeddingImpl", 128 * width);
    add(body, "drop", "torch::nn::DropoutImpl");
    auto h = add(body, "h", "torch::nn::SequentialImpl");
    model[h].sequential = true;
    for (uint64_t i = 0; i < layers; ++i)
      add_block(h, std::to_string(i));
    add(body, "ln_f", "torch::nn::LayerNormImpl", 2 * width);
    auto head = add(0, "lm_head", "smp::gpt_head_impl");
    if (tied)
      model[head].parameters = model[wte].parameters;
    else
      model[head].parameters.push_back({1000, "lm_head.weight", 256 * width});
  }

  model_info model;

private:
  size_t add(size_t parent, const std::string& name, std::string type,
             uint64_t elements = 0) {
    auto id = model.size();
    auto& x = model.emplace_back();
    x.path = model[parent].path.empty() ? name
                                        : model[parent].path + "." + name;
    x.type = std::move(type);
    if (elements > 0)
      x.parameters.push_back({id, x.path + ".weight", elements});
    if (id > 0)
      model[parent].children.push_back(module_id{id});
    return id;
  }

  void add_block(size_t h, const std::string& name) {
    auto block = add(h, name, "smp::gpt_block_impl");
    auto square = width_ * width_;
    add(block, "ln_1", "torch::nn::LayerNormImpl", 2 * width_);
    auto attn = add(block, "attn", "smp::gpt_attention_impl");
    add(attn, "c_attn", "torch::nn::LinearImpl", 3 * square + 3 * width_);
    add(attn, "c_proj", "torch::nn::LinearImpl", square + width_);
    add(attn, "resid_dropout", "torch::nn::DropoutImpl");
    add(block, "ln_2", "torch::nn::LayerNormImpl", 2 * width_);
    auto mlp = add(block, "mlp", "smp::gpt_mlp_impl");
    add(mlp, "c_fc", "torch::nn::LinearImpl", 4 * square + 4 * width_);
    add(mlp, "act", "torch::nn::GELUImpl");
    add(mlp, "c_proj", "torch::nn::LinearImpl", 4 * square + width_);
    add(mlp, "dropout", "torch::nn::DropoutImpl");
  }

  uint64_t width_;
};

} // namespace smp::test
