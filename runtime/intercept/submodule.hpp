#pragma once

// Interception of torch::nn modules. A module's `forward` is not virtual, so
// the member's type has to change, and only that:
//
//   torch::nn::Linear fc{8, 8};  ->  smp::submodule<torch::nn::Linear> fc{8,
//   8};
//
// `fc(x)` and `fc->forward(x)` then run where the partition put `fc`;
// `fc->weight`, `register_module("fc", fc)` and `parameters()` stay as before.

#include "runtime/calls/caller.hpp"
#include "runtime/calls/invoker.hpp"
#include "runtime/intercept/call_scope.hpp"
#include "runtime/intercept/shared_call.hpp"
#include "runtime/intercept/trace/retry_on_gpu.hpp"
#include "runtime/intercept/trace/trace_notes.hpp"
#include "runtime/model/call_translation.hpp"
#include "runtime/model/hook.hpp"
#include "runtime/sharing/forward_form.hpp"
#include "runtime/values/pack.hpp"
#include "transport/error.hpp"

#include <c10/util/Exception.h>

#include <optional>
#include <tuple>
#include <type_traits>
#include <typeinfo>
#include <utility>
#include <vector>

// Torch's modules take ten seconds to compile; users include what they need.
namespace torch::nn {
class Module;
template <class Contained>
class ModuleHolder;
} // namespace torch::nn

namespace smp {

/// Like `put_value`; an error names the argument.
template <class T>
value put_argument(packer& p, size_t position, const T& x) {
  value_path::scope place{p, "argument", position};
  return put_value(p, x);
}

/// Like `get_value`; an error names the argument.
template <class T>
auto get_argument(unpacker& u, size_t position, const value& x) {
  value_path::scope place{u, "argument", position};
  return get_value<T>(u, x);
}

/// Arguments that a callee may change visibly to its caller. (Tensors are sent
/// back separately; scalars cannot be shared with a caller.)
template <class T>
inline constexpr bool is_changeable = std::conjunction_v<
  std::is_lvalue_reference<T>,
  std::negation<std::is_const<std::remove_reference_t<T>>>,
  std::negation<std::is_same<std::decay_t<T>, at::Tensor>>>;

namespace detail {

/// Adds the tensors in `x` that are not in `p` yet; a no-op if smp cannot look
/// into a T.
template <class T>
void collect_tensors(packer& p, const T& x) {
  if constexpr (packable<T>)
    note_if_unsendable([&] { put_value(p, x); });
}

/// @returns the tensors in `xs`, each once.
template <class... Ts>
std::vector<at::Tensor> tensors_in_arguments(const Ts&... xs) {
  packer p;
  [[maybe_unused]] size_t i = 0;
  auto collect = [&](const auto& x) {
    value_path::scope place{p, "argument", i++};
    collect_tensors(p, x);
  };
  (collect(xs), ...);
  return p.tensors();
}

template <class T>
std::vector<at::Tensor> tensors_in_result(const T& x) {
  packer p;
  value_path::scope place{p, "result"};
  collect_tensors(p, x);
  return p.tensors();
}

/// Runs `f`, the body of `call`, and shows its tensors to the interceptors.
/// @returns the result of `f`
template <class R, class Impl, class F, class... Ts>
R run_intercepted(call_scope& call, const Impl& object, F&& f,
                  const Ts&... xs) {
  // `Module` is a virtual base: the complete object is the identity.
  call.arguments(dynamic_cast<const void*>(&object),
                 tensors_in_arguments(xs...));
  if constexpr (std::is_void_v<R>) {
    f();
    call.results({});
  } else {
    auto result = f();
    call.results(tensors_in_result(result));
    return result;
  }
}

/// Runs this rank's part of a shared call, through a distributed module with
/// other arguments or results.
template <class Impl, class R, class... Ts>
R call_translated(const hook_state& hook, Ts&&... xs) {
  using form = forward_form<Impl>;
  if constexpr (form::translatable
                && std::is_constructible_v<typename form::arguments, Ts...>) {
    typename form::arguments arguments{std::forward<Ts>(xs)...};
    std::optional<typename form::result> result;
    hook.translation->call(*hook.distributed, &arguments, &result);
    return std::move(*result);
  } else {
    refuse_shared_call();
  }
}

/// Runs this rank's part of a call that ranks share.
template <class Impl, class R, class... Ts>
R call_shared(call_scope& noted, const Impl& self, const hook_state& hook,
              Ts&&... xs) {
  if (hook.translation) {
    auto run = [&]() -> R {
      return call_translated<Impl, R>(hook, std::forward<Ts>(xs)...);
    };
    return noted.looks() ? run_intercepted<R>(noted, self, run, xs...) : run();
  }
  if constexpr (is_shareable<R, Ts...>) {
    std::vector<at::Tensor> tensors;
    (add_tensors(tensors, xs), ...);
    return from_tensors<R>(run_shared(
      noted, *hook.distributed, dynamic_cast<const void*>(&self), tensors));
  } else {
    refuse_shared_call();
  }
}

} // namespace detail

/// A call of `Impl::forward` with arguments of these types, as its owner runs
/// it. Instantiated at the call site, hence in the binary of every rank.
template <class Impl, class... Ts>
struct invoker {
  using result_type = std::remove_cvref_t<
    decltype(std::declval<Impl&>().Impl::forward(std::declval<Ts>()...))>;

  static invocation run(torch::nn::Module& object, unpacker& in,
                        const std::vector<value>& args, packer& out) {
    auto* impl = dynamic_cast<Impl*>(&object);
    if (!impl || args.size() != sizeof...(Ts))
      throw error{error_code::protocol, "a call does not fit its module"};
    return run(*impl, in, args, out, std::index_sequence_for<Ts...>{});
  }

  template <size_t... Is>
  static invocation run(Impl& impl, unpacker& in,
                        const std::vector<value>& args, packer& out,
                        std::index_sequence<Is...>) {
    // In a tuple, so that an argument taken by reference outlives the call.
    std::tuple<unpacked_t<std::decay_t<Ts>>...> xs{
      get_argument<std::decay_t<Ts>>(in, Is, args[Is])...};
    auto* hook = dynamic_cast<hook_base*>(&impl);
    auto forward = [&]() -> result_type {
      return impl.Impl::forward(static_cast<Ts>(std::get<Is>(xs))...);
    };
    intercepted_call what{.served = true};
    if (hook)
      what.module = hook->smp_hook.id;
    call_scope noted{what};
    auto call = [&]() -> result_type {
      if (hook && hook->smp_hook.distributed) [[unlikely]]
        return detail::call_shared<Impl, result_type>(
          noted, impl, hook->smp_hook, static_cast<Ts>(std::get<Is>(xs))...);
      return noted.looks() ? detail::run_intercepted<result_type>(
               noted, impl, forward, std::get<Is>(xs)...)
                           : forward();
    };
    invocation result;
    value_path::scope place{out, "result"};
    if constexpr (std::is_void_v<result_type>)
      call();
    else
      result.result = put_value(out, call());
    (put_changed<Ts>(out, Is, std::get<Is>(xs), result), ...);
    return result;
  }

  /// A container that the callee can change travels back (R12).
  template <class T, class U>
  static void put_changed(packer& out, uint32_t position, const U& x,
                          invocation& result) {
    if constexpr (is_changeable<T>)
      result.changed.emplace_back(position, put_value(out, x));
  }

  static inline const uint64_t id = register_invoker(typeid(invoker).name(),
                                                     &invoker::run);
};

namespace detail {

/// How the owner holds argument I of type T: a reference to a container that
/// may change, or a value.
template <class Impl, size_t I, class T>
using argument_t = typename forward_form<Impl>::template argument<I, T>;

/// Values are unpacked as the types that `forward` takes, not as the caller's:
/// an int given for an int64_t arrives as an int64_t.
template <class P, class T>
using wire_argument_t = std::conditional_t<
  std::is_lvalue_reference_v<P> && !std::is_const_v<std::remove_reference_t<P>>,
  P, unpacked_t<std::decay_t<P>>&&>;

template <class Impl, size_t I, class T>
void assign_changed(unpacker& in, const value& content, T& x) {
  using type = argument_t<Impl, I, T>;
  if constexpr (is_changeable<type>)
    x = get_value<std::decay_t<type>>(in, content);
}

template <class Impl, class R, size_t... Is, class... Ts>
R call_hooked(Impl& self, hook_state& hook, std::index_sequence<Is...>,
              Ts&&... xs) {
  static_assert(std::is_void_v<R> || !unpackable<R> || owning<R>,
                "forward of a module on another rank cannot return a view: "
                "return what owns it, as std::string or std::vector");
  using call = invoker<Impl, wire_argument_t<argument_t<Impl, Is, Ts>, Ts>...>;
  packer in;
  std::vector<value> args;
  try {
    (args.push_back(put_argument(
       in, Is, static_cast<const std::decay_t<argument_t<Impl, Is, Ts>>&>(xs))),
     ...);
  } catch (const error& err) {
    fail_call(hook.id, err);
  }
  call_target target;
  target.invoker = call::id;
  target.training = self.is_training();
  target.tensors_only = is_tensors<R>;
  auto result = call_remote(hook.owner, hook.id, target, in, std::move(args));
  for (auto& [position, content] : result.changed)
    ((position == Is ? assign_changed<Impl, Is>(result.tensors, content, xs)
                     : void()),
     ...);
  if constexpr (!std::is_void_v<R>)
    return get_value<R>(result.tensors, result.result);
}

/// Runs `Impl::forward` here and shows its tensors to interceptors. During a
/// trace, a call that fails on the CPU is retried on a GPU.
template <class Impl, class R, size_t... Is, class... Ts>
R call_intercepted(call_scope& noted, Impl& self, std::index_sequence<Is...>,
                   Ts&&... xs) {
  using call = invoker<Impl, wire_argument_t<argument_t<Impl, Is, Ts>, Ts>...>;
  note_outside_call(self);
  auto forward = [&]() -> R {
    return self.Impl::forward(std::forward<Ts>(xs)...);
  };
  try {
    return run_intercepted<R>(noted, self, forward, xs...);
  } catch (const c10::Error&) {
    if (!may_retry_on_gpu())
      throw;
    packer in;
    std::vector<value> args{put_argument(
      in, Is,
      static_cast<const std::decay_t<argument_t<Impl, Is, Ts>>&>(xs))...};
    invocation found;
    auto tensors = retry_on_gpu(self, in.tensors(),
                                [&](const std::vector<at::Tensor>& there) {
                                  unpacker u{there};
                                  packer out;
                                  found = call::run(self, u, args, out);
                                  return out.tensors();
                                });
    noted.results(tensors);
    if constexpr (!std::is_void_v<R>) {
      unpacker u{std::move(tensors)};
      return get_value<R>(u, found.result);
    }
  }
}

} // namespace detail

/// An `Impl` whose `forward` first looks up where it has to run. Hides
/// `Impl::forward`; everything else is inherited from Impl.
template <class Impl>
class hooked : public Impl, public hook_base {
public:
  using Impl::Impl;

  /// Runs `Impl::forward` here or at its owner.
  /// @returns a value even where that returns a reference: a result of another
  /// rank has no object here to refer to
  /// @throws error with rank and module if it fails there
  template <class... Ts>
  auto forward(Ts&&... xs) -> std::remove_cvref_t<
    decltype(std::declval<Impl&>().forward(std::forward<Ts>(xs)...))> {
    using result = std::remove_cvref_t<decltype(std::declval<Impl&>().forward(
      std::forward<Ts>(xs)...))>;
    if (smp_hook.local) {
      call_scope call{{smp_hook.id, smp_hook.ordered, false, smp_hook.stream,
                       detail::is_tensors<result>}};
      if (smp_hook.distributed) [[unlikely]]
        return detail::call_shared<Impl, result>(
          call, static_cast<const Impl&>(*this), smp_hook,
          std::forward<Ts>(xs)...);
      if (call.looks()) [[unlikely]]
        return detail::call_intercepted<Impl, result>(
          call, static_cast<Impl&>(*this), std::index_sequence_for<Ts...>{},
          std::forward<Ts>(xs)...);
      return Impl::forward(std::forward<Ts>(xs)...);
    }
    return detail::call_hooked<Impl, result>(
      static_cast<Impl&>(*this), smp_hook, std::index_sequence_for<Ts...>{},
      xs...);
  }
};

/// Holder of a module whose calls smp intercepts, used like the holder H.
template <class H>
class submodule
  : public torch::nn::ModuleHolder<hooked<typename H::ContainedType>> {
public:
  using base = torch::nn::ModuleHolder<hooked<typename H::ContainedType>>;
  using base::base;

  /// Calls `forward`; unlike the base's it accepts a templated one.
  template <class... Ts>
  auto operator()(Ts&&... xs)
    -> decltype(std::declval<hooked<typename H::ContainedType>&>().forward(
      std::forward<Ts>(xs)...)) {
    return this->impl_->forward(std::forward<Ts>(xs)...);
  }
};

} // namespace smp
