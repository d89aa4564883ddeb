#pragma once

#include "tp/transformer_layer_options.hpp"

#include <functional>
#include <string_view>
#include <type_traits>
#include <typeinfo>

namespace torch::nn {
class Module;
} // namespace torch::nn

namespace smp {

/// What a module of a registered class computes.
using layer_reader = std::function<transformer_layer_options(
  const torch::nn::Module&)>;

/// See `tp_register`.
bool register_native(const std::type_info& impl, std::string_view as);
bool register_layer(const std::type_info& impl, layer_reader read);

/// Lets tensor-parallel ranks share modules of class Impl as those of torch.nn
/// that are called `as` (paper, `smp.tp_register_with_module`): an Impl
/// computes the same, from parameters of the same names and shapes. "Linear",
/// "Embedding" or "Conv1D", a Linear whose weight is [in, out]. Before the
/// partition, on every rank.
/// @returns true
template <class Impl>
bool tp_register(std::string_view as) {
  return register_native(typeid(Impl), as);
}

/// Lets them share transformer layers of class Impl as a whole.
/// @param init_hook (const Impl&) -> transformer_layer_options
/// @returns true
template <class Impl, class F>
requires std::is_invocable_r_v<transformer_layer_options, F, const Impl&>
bool tp_register(F init_hook) {
  return register_layer(typeid(Impl), [init_hook](const auto& x) {
    return init_hook(dynamic_cast<const Impl&>(x));
  });
}

} // namespace smp
