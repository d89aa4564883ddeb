#include "runtime/session/distributed_parameters.hpp"

#include "runtime/session/rank_runtime.hpp"
#include "runtime/session/session.hpp"
#include "runtime/step/model_state.hpp"

namespace smp::nn {

namespace {

/// @param f the question, given the position in the model
template <class F>
bool ask(const at::Tensor& x, F f) {
  auto& state = session::current().internals().state();
  if (!state || !x.defined())
    return false;
  auto i = state->model().find(x);
  return i >= 0 && f(state->map(), static_cast<uint32_t>(i));
}

} // namespace

bool is_distributed_parameter(const at::Tensor& x) {
  return ask(x, [](auto& map, uint32_t i) { return map.slice(i) != nullptr; });
}

bool is_scaled_batch_parameter(const at::Tensor& x) {
  return ask(x, [](auto& map, uint32_t i) { return map.is_scaled_batch(i); });
}

} // namespace smp::nn
