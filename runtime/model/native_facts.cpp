#include "runtime/model/native_facts.hpp"

#include <torch/nn/module.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/normalization.h>

#include <string_view>

namespace smp {

namespace {

c10::IValue option_of(const torch::nn::EmbeddingOptions& x,
                      std::string_view name) {
  return name == "padding_idx"          ? c10::IValue{x.padding_idx()}
         : name == "sparse"             ? x.sparse()
         : name == "max_norm"           ? c10::IValue{x.max_norm()}
         : name == "norm_type"          ? x.norm_type()
         : name == "scale_grad_by_freq" ? x.scale_grad_by_freq()
                                        : c10::IValue{};
}

c10::IValue option_of(const torch::nn::LayerNormOptions& x,
                      std::string_view name) {
  return name == "normalized_shape" ? c10::IValue{x.normalized_shape()}
         : name == "eps"            ? x.eps()
                                    : c10::IValue{};
}

/// The state of a C++ module is in its tensors, or `set_stateful` declares it.
class native_facts final : public module_facts {
public:
  explicit native_facts(torch::nn::Module& x)
    : object_(x), kept_(x.weak_from_this().lock()) {
    // nop
  }

  bool is_training() const noexcept override {
    return object_.is_training();
  }

  void train(bool on) override {
    object_.train(on);
  }

  std::string differs_from_class() const override {
    return {};
  }

  c10::IValue option(const char* name) const override {
    if (auto* x = dynamic_cast<torch::nn::EmbeddingImpl*>(&object_))
      return option_of(x->options, name);
    if (auto* x = dynamic_cast<torch::nn::LayerNormImpl*>(&object_))
      return option_of(x->options, name);
    return {};
  }

  std::unique_ptr<kept_attributes> keep_attributes() const override {
    return nullptr;
  }

private:
  torch::nn::Module& object_;
  std::shared_ptr<const void> kept_;
};

} // namespace

std::shared_ptr<module_facts> facts_of(torch::nn::Module& x) {
  if (auto* foreign = dynamic_cast<foreign_module*>(&x))
    return {x.weak_from_this().lock(), foreign};
  return std::make_shared<native_facts>(x);
}

} // namespace smp
