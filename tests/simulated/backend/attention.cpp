#include "tests/simulated/backend/kernels.hpp"

#include <ATen/SDPBackend.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_fused_sdp_choice.h>

#include <cstdint>
#include <optional>

// The device computes attention where the CPU does so in one operator, with
// that operator: else it is made of others, which round differently.

namespace smp::sim {

namespace {

int64_t choice_of_cpu(const at::Tensor& query, const at::Tensor& key,
                      const at::Tensor& value,
                      const std::optional<at::Tensor>& mask, double dropout,
                      bool is_causal, std::optional<double> scale, bool gqa) {
  auto masked = mask && mask->defined();
  if (masked && mask->requires_grad())
    return static_cast<int64_t>(at::SDPBackend::math);
  twins twin_of;
  auto cpu_mask = masked ? std::optional{twin_of(*mask)} : std::nullopt;
  return at::_fused_sdp_choice(twin_of(query), twin_of(key), twin_of(value),
                               cpu_mask, dropout, is_causal, scale, gqa);
}

} // namespace

} // namespace smp::sim

namespace at::native {

REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &smp::sim::choice_of_cpu)

} // namespace at::native
