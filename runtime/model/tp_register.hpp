#pragma once

#include "runtime/model/call_translation.hpp"
#include "runtime/model/forward_form.hpp"
#include "tp/module_options.hpp"
#include "transport/error.hpp"

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <typeinfo>
#include <utility>
#include <vector>

namespace torch::nn {
class Module;
} // namespace torch::nn

namespace smp {

/// The axis along which peers cut each parameter of a module, by its name
/// there. Each peer holds all of a parameter that is not listed.
using parameter_axes = std::map<std::string, int64_t>;

namespace nn {

/// The input to a user's distributed module: what this rank holds of each
/// parameter of the ordinary module, by its name there.
using parameter_parts = std::map<std::string, at::Tensor>;

} // namespace nn

/// What smp knows about a registered class of modules.
struct registered_class {
  /// @returns how an object is shared, without its parameters
  std::function<native_module(const torch::nn::Module&)> read;
  /// Null: tensors pass unchanged.
  std::shared_ptr<const call_translation> calls = {};
  /// Builds the result then. Null: it is one tensor.
  child_result result = nullptr;
};

/// See `tp_register`.
bool register_native(const std::type_info& impl, std::string_view as);
bool register_class(const std::type_info& impl, registered_class x);

/// @returns why parameters cannot be cut along these axes, or nothing
std::string refusal_of_axes(const native_module& x, const parameter_axes& axes,
                            int64_t peers);

parameter_slices slices_of_axes(const native_module& x,
                                const parameter_axes& axes, int64_t rank,
                                int64_t peers);

namespace detail {

/// Stands for a hook that the user does not give.
struct no_hook {};

template <class D>
concept built_in_distribution = requires {
  D::arguments;
  typename D::options;
};

/// Describes how objects of a user's class D share modules. The options
/// of D are of type O.
template <class D, class O>
class custom_distribution {
public:
  static const distribution& get() {
    static const std::string name = type_name(typeid(D));
    static const distribution result{.type = name,
                                     .refusal = refusal,
                                     .slices = slices,
                                     .make = make,
                                     .counts_samples_once = false};
    return result;
  }

  class module final : public distributed_module {
  public:
    explicit module(D x) : inner(std::move(x)) {
      // nop
    }

    std::vector<at::Tensor>
    forward(std::span<const at::Tensor>) const override {
      throw error{error_code::internal, "a call without its translation"};
    }

    D inner;
  };

private:
  static std::string type_name(const std::type_info& x);

  static const O& options_of(const native_module& x) {
    return *static_cast<const O*>(x.options.get());
  }

  static std::string refusal(const native_module& x, int64_t peers) {
    if constexpr (requires { D::refusal(options_of(x), peers); })
      if (std::string why = D::refusal(options_of(x), peers); !why.empty())
        return why;
    return refusal_of_axes(x, D::axes(options_of(x)), peers);
  }

  static parameter_slices slices(const native_module& x, int64_t rank,
                                 int64_t peers) {
    return slices_of_axes(x, D::axes(options_of(x)), rank, peers);
  }

  static std::unique_ptr<distributed_module> make(const native_module& x,
                                                  const parameter_slices&) {
    return std::make_unique<module>(D{options_of(x), x.parameters});
  }
};

/// @returns the name of a type, without its namespaces
std::string short_name(const std::type_info& x);

template <class D, class O>
std::string custom_distribution<D, O>::type_name(const std::type_info& x) {
  return short_name(x);
}

/// Used only where a Module is registered: AnyValue is complete there.
template <class Module>
struct any_value {
  using type = torch::nn::AnyValue;
};

/// True for classes whose results can be built from the tensors in them.
template <class Module>
concept returns_tensors = gives_tensors<typename forward_form<Module>::result>;

template <class Module>
typename any_value<Module>::type
result_of_child(const std::vector<at::Tensor>& xs) {
  return typename any_value<Module>::type{
    from_tensors<typename forward_form<Module>::result>(xs)};
}

template <class Module, class Distributed, class Options, class Forward,
          class Return>
class hooked_calls final : public call_translation {
public:
  using form = forward_form<Module>;
  using result = typename form::result;

  hooked_calls(Forward forward, Return back)
    : forward_(std::move(forward)), return_(std::move(back)) {
    // nop
  }

  void call(const distributed_module& how, void* arguments,
            void* to) const override {
    static_cast<std::optional<result>*>(to)->emplace(
      run(how, *static_cast<typename form::arguments*>(arguments)));
  }

  typename any_value<Module>::type
  call_child(const distributed_module& how,
             std::vector<torch::nn::AnyValue>&& arguments) const override {
    return any_child(how, arguments);
  }

private:
  // A template, as AnyValue is complete only where this is instantiated.
  template <class Any>
  Any any_child(const distributed_module& how, std::vector<Any>& xs) const {
    constexpr auto n = std::tuple_size_v<typename form::arguments>;
    if (xs.size() != n)
      throw error{error_code::user_code,
                  "a shared module of a class with hooks got "
                    + std::to_string(xs.size()) + " arguments, not "
                    + std::to_string(n) + ": give all of them"};
    return [&]<size_t... Is>(std::index_sequence<Is...>) {
      typename form::arguments arguments{
        xs[Is]
          .template get<
            std::tuple_element_t<Is, typename form::arguments>>()...};
      return Any{run(how, arguments)};
    }
    (std::make_index_sequence<n>{});
  }

  result run(const distributed_module& how,
             typename form::arguments& xs) const {
    if constexpr (std::is_same_v<Forward, no_hook>)
      return back(
        std::apply([&](auto&... ys) { return inner(how, ys...); }, xs));
    else
      return back(pass(how, std::apply(forward_, xs)));
  }

  /// @param x result of the forward hook
  template <class T>
  auto pass(const distributed_module& how, T&& x) const {
    if constexpr (!built_in_distribution<Distributed> && requires {
                    std::tuple_size<std::decay_t<T>>::value;
                  })
      return std::apply([&](auto&... ys) { return inner(how, ys...); }, x);
    else
      return inner(how, x);
  }

  template <class... Ts>
  auto inner(const distributed_module& how, Ts&... xs) const {
    if constexpr (built_in_distribution<Distributed>) {
      static_assert((holds_tensors<Ts&> && ...),
                    "tp_register: a distributed module of smp takes tensors, "
                    "tuples and vectors of them; give a forward_hook");
      std::vector<at::Tensor> tensors;
      (add_tensors(tensors, xs), ...);
      check(tensors);
      return how.forward(tensors);
    } else {
      using custom = custom_distribution<Distributed, Options>;
      auto& module = static_cast<const typename custom::module&>(how).inner;
      static_assert(
        std::is_invocable_v<forward_of<Ts...>, const Distributed&, Ts&...>,
        "tp_register: forward of the distributed module does not "
        "take what the forward_hook gives, or the arguments of "
        "the module if there is none; it must be const");
      return module.forward(xs...);
    }
  }

  template <class... Ts>
  struct forward_of {
    auto operator()(const Distributed& d, Ts&... xs) const
      -> decltype(d.forward(xs...));
  };

  static void check(const std::vector<at::Tensor>& xs) {
    constexpr size_t wanted = Distributed::arguments;
    if (wanted != 0 && xs.size() != wanted)
      throw error{error_code::user_code,
                  "the forward hook of " + short_name(typeid(Module)) + " gave "
                    + std::to_string(xs.size()) + " tensors, but "
                    + short_name(typeid(Distributed)) + " takes "
                    + std::to_string(wanted)};
    for (auto& x : xs)
      if (!x.defined())
        throw error{error_code::user_code, "the forward hook of "
                                             + short_name(typeid(Module))
                                             + " gave an undefined tensor"};
  }

  /// @param x result of the distributed module
  template <class T>
  result back(T&& x) const {
    using given = std::decay_t<T>;
    if constexpr (std::is_same_v<Return, no_hook>) {
      if constexpr (built_in_distribution<Distributed>) {
        static_assert(gives_tensors<result>,
                      "tp_register: forward returns something else than "
                      "tensors; give a return_hook");
        return from_tensors<result>(x);
      } else {
        static_assert(std::is_convertible_v<given, result>,
                      "tp_register: the distributed module returns something "
                      "else than the module; give a return_hook");
        return std::forward<T>(x);
      }
    } else if constexpr (
      built_in_distribution<
        Distributed> && std::is_invocable_v<const Return&, at::Tensor>) {
      static_assert(std::is_invocable_r_v<result, const Return&, at::Tensor>,
                    "tp_register: the return_hook has to return what forward "
                    "of the module does");
      return return_(x.at(0));
    } else {
      static_assert(std::is_invocable_r_v<result, const Return&, given>,
                    "tp_register: the return_hook has to take what the "
                    "distributed module returns, and to return what forward "
                    "of the module does");
      return return_(std::forward<T>(x));
    }
  }

  Forward forward_;
  Return return_;
};

} // namespace detail

/// Lets tensor-parallel ranks share modules of class Module like the torch.nn
/// modules that are called `as` (paper, `smp.tp_register_with_module`): they
/// compute the same, from parameters of the same names and shapes. `as` is
/// "Linear", "Embedding" or "Conv1D", a Linear whose weight is [in, out]. Call
/// this before the partition, on every rank.
/// @returns true
template <class Module>
bool tp_register(std::string_view as) {
  return register_native(typeid(Module), as);
}

/// The same for a class of TorchScript files, by its name in Python:
/// "my_package.layers.MyLinear". If its code does more than that of `as`, it is
/// not shared, and the print of the partition says so.
/// @throws error (config) if no module is called `as`
/// @returns true
bool tp_register(std::string_view type, std::string_view as);

/// Lets them share modules of class Module through a Distributed with other
/// options, arguments or results (paper, appendix "Registering distributed
/// modules"): one of `smp::nn::distributed_*`, or a user's class with
///
///   static smp::parameter_axes axes(const O&);
///   Distributed(const O&, const smp::nn::parameter_parts&);
///   R forward(Ts...) const;
///   static std::string refusal(const O&, int64_t peers); // if it needs one
///
/// where O is what `init_hook` returns. Distributed gets the part of the
/// parameters that this rank holds. Its `forward` is called on all peers, each
/// with its own samples, and exchanges what it needs by tp/functions.hpp.
/// @param init_hook (const Module&) -> options of Distributed; the same on all
/// ranks
/// @param forward_hook takes the arguments of Module's `forward`, and returns
/// those of Distributed's, in a tuple if there are several
/// @param return_hook takes the result of Distributed's `forward`, and
/// returns that of Module's
/// @returns true
template <class Module, class Distributed, class Init,
          class Forward = detail::no_hook, class Return = detail::no_hook>
bool tp_register(Init init_hook, Forward forward_hook = {},
                 Return return_hook = {}) {
  static_assert(std::is_invocable_v<Init, const Module&>,
                "tp_register: the init_hook has to take a const Module&");
  using options = std::decay_t<std::invoke_result_t<Init, const Module&>>;
  registered_class x;
  if constexpr (detail::built_in_distribution<Distributed>) {
    static_assert(std::is_same_v<options, typename Distributed::options>,
                  "tp_register: the init_hook has to return the options of the "
                  "distributed module (tp/module_options.hpp)");
    x.read = [init_hook](const auto& m) {
      return described(init_hook(dynamic_cast<const Module&>(m)));
    };
  } else {
    x.read = [init_hook](const auto& m) {
      native_module result;
      result.options = std::make_shared<const options>(
        init_hook(dynamic_cast<const Module&>(m)));
      result.how = &detail::custom_distribution<Distributed, options>::get();
      result.type = result.how->type;
      return result;
    };
  }
  constexpr bool as_they_are = std::conjunction_v<
    std::bool_constant<detail::built_in_distribution<Distributed>>,
    std::is_same<Forward, detail::no_hook>,
    std::is_same<Return, detail::no_hook>>;
  if constexpr (!as_they_are) {
    static_assert(detail::forward_form<Module>::translatable,
                  "tp_register: a class with hooks has one forward, which "
                  "returns something and takes nothing to be changed");
    x.calls = std::make_shared<const detail::hooked_calls<
      Module, Distributed, options, Forward, Return>>(std::move(forward_hook),
                                                      std::move(return_hook));
  } else if constexpr (detail::returns_tensors<Module>) {
    x.result = &detail::result_of_child<Module>;
  }
  return register_class(typeid(Module), std::move(x));
}

} // namespace smp
