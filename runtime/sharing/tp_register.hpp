#pragma once

#include "runtime/model/call_translation.hpp"
#include "runtime/sharing/forward_form.hpp"
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

namespace torch::jit {
struct Module;
} // namespace torch::jit

namespace torch::nn {
class Module;
} // namespace torch::nn

namespace smp {

struct walked_module;

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
  /// @returns how a module of it is shared, without its parameters
  std::function<native_module(const walked_module&)> read;
  /// Null: tensors pass unchanged.
  std::shared_ptr<const call_translation> calls = {};
  /// Of a class of TorchScript files; the same.
  std::shared_ptr<const script_translation> script_calls = {};
  /// Builds the result then. Null: it is one tensor.
  child_result result = nullptr;
};

/// See `tp_register`.
bool register_native(const std::type_info& impl, std::string_view as);
bool register_class(const std::type_info& impl, registered_class x);
bool register_class(std::string_view type, registered_class x);

/// @returns as what a class without hooks was registered: "Linear"
std::optional<std::string> registered_name(std::string_view type);

std::optional<registered_class> registration_of(const std::string& type);

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

/// True if tensors pass unchanged from a class to a D and back.
template <class D, class Forward, class Return>
inline constexpr bool passes_unchanged = std::conjunction_v<
  std::bool_constant<built_in_distribution<D>>, std::is_same<Forward, no_hook>,
  std::is_same<Return, no_hook>>;

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

/// The object itself, for init hooks.
const torch::nn::Module& object_of(const walked_module& x);
void with_script(const walked_module& x,
                 const std::function<void(const torch::jit::Module&)>& f);

/// Makes what an init hook returns into a description of its module.
template <class Distributed, class Options>
native_module described_by(Options&& x) {
  using options = std::decay_t<Options>;
  if constexpr (built_in_distribution<Distributed>) {
    static_assert(std::is_same_v<options, typename Distributed::options>,
                  "tp_register: the init_hook has to return the options of the "
                  "distributed module (tp/module_options.hpp)");
    return described(x);
  } else {
    native_module result;
    result.options = std::make_shared<const options>(std::forward<Options>(x));
    result.how = &custom_distribution<Distributed, options>::get();
    result.type = result.how->type;
    return result;
  }
}

/// Calls a distributed module with what a forward hook makes of arguments.
template <class Distributed, class Options, class Forward>
class hooked_forward {
public:
  /// @param type of the class, for errors
  hooked_forward(std::string type, Forward x)
    : type_(std::move(type)), hook_(std::move(x)) {
    // nop
  }

  /// @param xs tuple of the arguments of the class
  /// @returns the result of the distributed module; of one of smp's, its
  /// tensors
  template <class Arguments>
  auto operator()(const distributed_module& how, Arguments& xs) const {
    if constexpr (std::is_same_v<Forward, no_hook>)
      return std::apply([&](auto&... ys) { return inner(how, ys...); }, xs);
    else
      return pass(how, std::apply(hook_, xs));
  }

  const std::string& type() const noexcept {
    return type_;
  }

private:
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

  void check(const std::vector<at::Tensor>& xs) const {
    constexpr size_t wanted = Distributed::arguments;
    if (wanted != 0 && xs.size() != wanted)
      throw error{error_code::user_code,
                  "the forward hook of " + type_ + " gave "
                    + std::to_string(xs.size()) + " tensors, but "
                    + short_name(typeid(Distributed)) + " takes "
                    + std::to_string(wanted)};
    for (auto& x : xs)
      if (!x.defined())
        throw error{error_code::user_code, "the forward hook of " + type_
                                             + " gave an undefined tensor"};
  }

  std::string type_;
  Forward hook_;
};

template <class Module, class Distributed, class Options, class Forward,
          class Return>
class hooked_calls final : public call_translation {
public:
  using form = forward_form<Module>;
  using result = typename form::result;

  hooked_calls(Forward forward, Return back)
    : forward_(short_name(typeid(Module)), std::move(forward)),
      return_(std::move(back)) {
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
    return back(forward_(how, xs));
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

  hooked_forward<Distributed, Options, Forward> forward_;
  Return return_;
};

// -- classes of TorchScript files ---------------------------------------------

/// @throws error (user_code) unless there are `wanted` arguments
void check_script_arguments(const std::string& type,
                            const std::vector<c10::IValue>& xs, size_t wanted);

/// @throws error (user_code): the conversion of argument `i` failed
[[noreturn]] void refuse_script_argument(const std::string& type, size_t i,
                                         const c10::IValue& x);

/// Like `any_value`: IValue is complete only where a class is registered.
template <class Distributed>
struct script_value {
  using type = c10::IValue;
};

template <class F>
struct form_of_function;

template <class R, class... Ts>
struct form_of_function<std::function<R(Ts...)>> {
  using arguments = std::tuple<std::decay_t<Ts>...>;
};

/// The arguments of a class of a file, as its hook takes them; without a hook,
/// as the distributed module does.
template <class Distributed, class Forward>
auto form_of_script_call() {
  if constexpr (!std::is_same_v<Forward, no_hook>)
    return form_of_function<decltype(std::function{std::declval<Forward>()})>{};
  else
    return forward_form<Distributed>{};
}

template <class Distributed, class Options, class Forward, class Return>
class hooked_script_calls final : public script_translation {
public:
  hooked_script_calls(std::string type, Forward forward, Return back)
    : forward_(std::move(type), std::move(forward)), return_(std::move(back)) {
    // nop
  }

  typename script_value<Distributed>::type
  call(const distributed_module& how,
       const std::vector<c10::IValue>& xs) const override {
    if constexpr (takes_tensors) {
      std::tuple tensors{tensors_of(xs)};
      return back(forward_(how, tensors));
    } else {
      using arguments = typename decltype(form_of_script_call<
                                          Distributed, Forward>())::arguments;
      constexpr auto n = std::tuple_size_v<arguments>;
      check_script_arguments(forward_.type(), xs, n);
      auto converted = convert<arguments>(xs, std::make_index_sequence<n>{});
      return back(forward_(how, converted));
    }
  }

private:
  static constexpr bool takes_tensors
    = std::is_same_v<Forward, no_hook> && built_in_distribution<Distributed>;

  template <class Arguments, class Value, size_t... Is>
  Arguments convert(const std::vector<Value>& xs,
                    std::index_sequence<Is...>) const {
    return {to<std::tuple_element_t<Is, Arguments>>(xs[Is], Is)...};
  }

  // Value is complete only where this is instantiated.
  template <class T, class Value>
  T to(const Value& x, size_t i) const {
    try {
      return x.template to<T>();
    } catch (const std::exception&) {
      refuse_script_argument(forward_.type(), i, x);
    }
  }

  /// @param x result of the distributed module
  template <class T>
  typename script_value<Distributed>::type back(T&& x) const {
    if constexpr (!std::is_same_v<Return, no_hook>) {
      if constexpr (
        built_in_distribution<
          Distributed> && std::is_invocable_v<const Return&, at::Tensor>)
        return return_(x.at(0));
      else
        return return_(std::forward<T>(x));
    } else if constexpr (built_in_distribution<Distributed>) {
      return script_result(x);
    } else {
      return std::forward<T>(x);
    }
  }

  hooked_forward<Distributed, Options, Forward> forward_;
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
  x.read = [init_hook](const walked_module& m) {
    return detail::described_by<Distributed>(
      init_hook(dynamic_cast<const Module&>(detail::object_of(m))));
  };
  if constexpr (!detail::passes_unchanged<Distributed, Forward, Return>) {
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

/// The same for a class of TorchScript files, by its name in Python, e.g. in a
/// library of `model.operator_libraries` of smp-train.
/// @param init_hook (const torch::jit::Module&) -> options of Distributed
/// @param forward_hook takes the arguments of the class's `forward`, all of
/// them, as TorchScript converts them: tensors, numbers, texts, and tuples,
/// vectors and optionals of these
/// @param return_hook returns what `forward` of the class does; without it, the
/// result is one tensor, or a tuple of them
/// @returns true
template <class Distributed, class Init, class Forward = detail::no_hook,
          class Return = detail::no_hook>
bool tp_register(std::string_view type, Init init_hook,
                 Forward forward_hook = {}, Return return_hook = {}) {
  static_assert(std::is_invocable_v<Init, const torch::jit::Module&>,
                "tp_register: the init_hook of a class of a file has to take "
                "a const torch::jit::Module&");
  using options = std::decay_t<
    std::invoke_result_t<Init, const torch::jit::Module&>>;
  registered_class x;
  x.read = [init_hook](const walked_module& m) {
    native_module result;
    detail::with_script(m, [&](const torch::jit::Module& object) {
      result = detail::described_by<Distributed>(init_hook(object));
    });
    return result;
  };
  if constexpr (!detail::passes_unchanged<Distributed, Forward, Return>)
    x.script_calls = std::make_shared<
      const detail::hooked_script_calls<Distributed, options, Forward, Return>>(
      std::string{type}, std::move(forward_hook), std::move(return_hook));
  return register_class(type, std::move(x));
}

} // namespace smp
