#include "runtime/train/models/language_head.hpp"

#include <optional>

namespace smp {

language_head::language_head(torch::nn::Module& parent,
                             const torch::Tensor& weight, bool with_loss,
                             const std::string& name,
                             const torch::Tensor& bias) {
  if (with_loss) {
    with_loss_ = submodule<nn::lm_head>(weight, cross_entropy_options{}, bias);
    parent.register_module(name, with_loss_);
  } else {
    plain_ = submodule<tied_linear>(weight, bias);
    parent.register_module(name, plain_);
  }
}

torch::Tensor language_head::logits(const torch::Tensor& hidden) {
  return with_loss_ ? with_loss_(hidden, std::nullopt) : plain_(hidden);
}

torch::Tensor language_head::loss(const torch::Tensor& hidden,
                                  const torch::Tensor& labels) {
  return with_loss_ ? with_loss_(hidden, std::optional{labels})
                    : token_loss(plain_(hidden), labels);
}

} // namespace smp
