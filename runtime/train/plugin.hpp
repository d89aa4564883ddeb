#pragma once

// Models that smp-train loads from a user's shared library
// (docs/plugin.md, examples/plugin_model.cpp):
//
//   struct net_impl : torch::nn::Module {
//     explicit net_impl(const smp::model_options& x);
//     torch::Tensor forward(torch::Tensor x, torch::Tensor y); // the loss
//   };
//   TORCH_MODULE_IMPL(net, net_impl);
//   SMP_REGISTER_MODEL("net", net)

#include "runtime/intercept/submodule.hpp"
#include "runtime/train/trainable.hpp"

#include <torch/headeronly/version.h>

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <type_traits>
#include <utility>

namespace smp {

// -- options ------------------------------------------------------------------

/// The keys `model.options.*` of the configuration, as the model reads them. A
/// key that the model never reads is a mistake of the user, so it is refused
/// once the model is made.
class model_options {
public:
  explicit model_options(std::map<std::string, std::string> values)
    : values_(std::move(values)) {
    // nop
  }

  /// @returns the value of model.options.`name`, or `fallback`
  /// @throws error (config) naming the key if it is not an integer
  int64_t integer(const std::string& name, int64_t fallback) const;

  /// @throws error (config) naming the key if it is not a number
  double number(const std::string& name, double fallback) const;

  /// @throws error (config) naming the key if it is neither true nor false
  bool flag(const std::string& name, bool fallback) const;

  std::string text(const std::string& name, const std::string& fallback) const;

  /// @throws error (config) if an option was given that the model never read
  void check_all_used() const;

private:
  const std::string* find(const std::string& name) const;

  std::map<std::string, std::string> values_;
  mutable std::set<std::string> asked_;
};

// -- registration -------------------------------------------------------------

#ifndef SMP_PLUGIN_INTERFACE
/// Changes whenever libraries built before the change would crash.
#  define SMP_PLUGIN_INTERFACE 1
#endif

#define SMP_TEXT_OF(x) #x
#define SMP_TEXT(x) SMP_TEXT_OF(x)

/// What smp and a plug-in must have in common, as the compiler saw it.
#define SMP_PLUGIN_ABI                                                         \
  "interface " SMP_TEXT(SMP_PLUGIN_INTERFACE) ", LibTorch " SMP_TEXT(          \
    TORCH_VERSION_MAJOR) "." SMP_TEXT(TORCH_VERSION_MINOR) "." SMP_TEXT(       \
    TORCH_VERSION_PATCH) ", C++ ABI " SMP_TEXT(__GXX_ABI_VERSION) ", "         \
  "libstdc++ " SMP_TEXT(_GLIBCXX_RELEASE)

using plugin_factory = std::unique_ptr<trainable> (*)(const model_options&);

/// Called while the library is loaded; use the macro below.
/// @returns true
bool register_plugin_model(const char* abi, const char* name,
                           plugin_factory f) noexcept;

namespace detail {

template <class F>
struct number_of_tensors;

template <class C, class R, class... Ts>
struct number_of_tensors<R (C::*)(Ts...)> {
  static_assert((std::is_same_v<std::decay_t<Ts>, at::Tensor> && ...),
                "forward of a plug-in model takes tensors, or one smp::batch");
  static constexpr size_t value = sizeof...(Ts);
};

/// @throws error (config) saying that the model takes another number
void check_number_of_tensors(size_t given, size_t taken);

template <class Holder, size_t... Is>
auto forward_tensors(Holder& model, const batch& xs,
                     std::index_sequence<Is...>) {
  return model->forward(at::Tensor{xs[Is]}...);
}

template <class Impl>
constexpr bool takes_batch = std::is_invocable_v<decltype(&Impl::forward),
                                                 Impl&, batch>;

template <class Impl>
void check_inputs(size_t tensors) {
  if constexpr (!takes_batch<Impl>)
    check_number_of_tensors(tensors,
                            number_of_tensors<decltype(&Impl::forward)>::value);
}

template <class Holder>
auto forward_batch(Holder& model, const batch& xs) {
  using impl = typename Holder::ContainedType;
  if constexpr (takes_batch<impl>)
    return model->forward(xs);
  else
    return forward_tensors(
      model, xs,
      std::make_index_sequence<
        number_of_tensors<decltype(&impl::forward)>::value>{});
}

inline at::Tensor loss_in(at::Tensor x) {
  return x;
}

/// The first element of a tuple.
template <class Tuple>
at::Tensor loss_in(Tuple x) {
  return std::get<0>(std::move(x));
}

template <class Holder>
std::unique_ptr<trainable> make_plugin_model(const model_options& x) {
  Holder model{x};
  return std::make_unique<nn_trainable>(
    model.ptr(),
    [model](const batch& xs) mutable {
      return loss_in(forward_batch(model, xs));
    },
    &check_inputs<typename Holder::ContainedType>);
}

} // namespace detail

/// Registers HOLDER (made by TORCH_MODULE or TORCH_MODULE_IMPL) as model.name =
/// NAME. Its module is made from `const smp::model_options&`; its forward takes
/// the tensors of a (micro)batch, or all of them as one `smp::batch`, and
/// returns the scalar loss, or a tuple whose first element is the loss. At
/// namespace scope, in a namespace with a name.
#define SMP_REGISTER_MODEL(NAME, HOLDER)                                       \
  [[maybe_unused]] static const bool SMP_JOIN(smp_registered_, __LINE__) = ::  \
    smp::register_plugin_model(SMP_PLUGIN_ABI, NAME,                           \
                               &::smp::detail::make_plugin_model<HOLDER>);

#define SMP_JOIN(a, b) SMP_JOIN_AGAIN(a, b)
#define SMP_JOIN_AGAIN(a, b) a##b

// -- loading ------------------------------------------------------------------

/// Loads the library, but makes no model.
/// @param library path of the file
/// @throws error (config): cannot be loaded, built for another smp or LibTorch,
///         no model of this name (listing those that it has)
void check_plugin_model(const std::string& library, const std::string& name);

/// Loads the library and makes the model.
/// @throws error (config) as above, and for an option that is wrong or unused
std::unique_ptr<trainable> make_plugin_model(const std::string& library,
                                             const std::string& name,
                                             const model_options& options);

} // namespace smp
