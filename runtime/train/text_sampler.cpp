#include "runtime/train/text_sampler.hpp"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <array>
#include <cmath>

namespace smp {

text_sampler::text_sampler(std::string prompt, options x)
  : options_(x),
    bytes_(std::move(prompt)),
    prompt_size_(bytes_.size()),
    engine_(x.seed) {
  // nop
}

at::Tensor text_sampler::input() const {
  const auto n = std::min<size_t>(options_.context, bytes_.size());
  auto result = at::empty({1, static_cast<int64_t>(n)}, at::kLong);
  std::transform(bytes_.end() - static_cast<ptrdiff_t>(n), bytes_.end(),
                 result.mutable_data_ptr<int64_t>(),
                 [](char c) { return static_cast<uint8_t>(c); });
  return result;
}

void text_sampler::add(const at::Tensor& logits) {
  auto contiguous = logits.to(at::kCPU).contiguous();
  auto* first = contiguous.const_data_ptr<float>();
  const double highest = *std::max_element(first, first + 256);
  std::array<double, 256> weights;
  double sum = 0;
  for (size_t i = 0; i < weights.size(); ++i) {
    weights[i] = std::exp((first[i] - highest) / options_.temperature);
    sum += weights[i];
  }
  // In [0, sum); the distributions of standard libraries differ.
  auto left = std::ldexp(static_cast<double>(engine_() >> 11), -53) * sum;
  size_t byte = 0;
  while (byte < 255 && left >= weights[byte])
    left -= weights[byte++];
  bytes_ += static_cast<char>(byte);
}

} // namespace smp
