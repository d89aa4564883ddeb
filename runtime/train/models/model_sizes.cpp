#include "runtime/train/models/model_sizes.hpp"

#include "runtime/nn/layers.hpp"
#include "runtime/nn/sizes.hpp"

namespace smp {

void require_transformer(const model_sizes& x) {
  require_positive("model.vocabulary", x.vocabulary);
  require_positive("model.sequence_length", x.sequence_length);
  require_positive("model.layers", x.layers);
  if (x.head_size == 0)
    require_heads(x.width, x.heads);
  require_positive("model.width", x.width);
  require_positive("model.heads", x.heads);
  require_probability("model.dropout", x.dropout);
}

int64_t inner_width(const model_sizes& x) {
  return x.feed_forward > 0 ? x.feed_forward : 4 * x.width;
}

torch::nn::LayerNormOptions norm_options(const model_sizes& x) {
  return torch::nn::LayerNormOptions({x.width}).eps(x.norm_eps);
}

submodule<torch::nn::Linear> make_linear(int64_t in, int64_t out, double std,
                                         bool bias) {
  submodule<torch::nn::Linear> result{
    torch::nn::LinearOptions(in, out).bias(bias)};
  init_linear(*result, std);
  return result;
}

} // namespace smp
