#pragma once

#include "runtime/session/session.hpp"
#include "runtime/step/split.hpp"
#include "runtime/step/step_call.hpp"
#include "runtime/step/step_output.hpp"

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <type_traits>
#include <typeindex>
#include <utility>

namespace smp {

struct step_options {
  /// Default: `smp.microbatches` of the session. The same on all ranks of the
  /// pipeline group.
  std::optional<uint64_t> microbatches = {};
  /// Positions, from 0, of arguments passed whole to every microbatch.
  std::set<size_t> non_split_inputs = {};
  /// Axis along which an argument is split, by position; default 0.
  std::map<size_t, int64_t> input_split_axes = {};
  /// False: on pp_rank 0 the tensors of `outputs` keep their graph, and with it
  /// all saved tensors. Gradients cross ranks inside the step only (R16).
  bool detach_outputs = true;
  /// The body has side effects and must not be run twice.
  bool no_rerun = false;
};

class form_comparison;

namespace detail {

/// @param compared for `compare_samples`
using step_code = std::function<value(packer&, uint64_t microbatch,
                                      form_comparison& compared)>;

/// Runs one step of the current session; see `step_runner::run_step`.
/// @param body may be empty on ranks other than pp_rank 0
/// @param detach false: results keep their graph on pp_rank 0
/// @returns null entries for results of void bodies
std::vector<std::shared_ptr<step_result>>
run_step(const step_call& x, const step_code& body, bool detach);

/// See `step_runner::skip_step`.
void skip_step();

/// Tells whether this rank must know which steps have the same flow (R33).
bool needs_signature();

/// @returns a hash of the function, and of the sizes, dtypes and strides of
/// `arguments`.
uint64_t signature(size_t function, const packer& arguments);

/// @returns the same number for functions with the same code.
template <class F>
size_t identity(const F& f) {
  if constexpr (std::is_pointer_v<F>)
    return std::hash<F>{}(f);
  else if constexpr (requires { f.target_type(); }) // std::function
    return std::type_index{f.target_type()}.hash_code();
  else
    return std::type_index{typeid(F)}.hash_code();
}

/// Tells whether `compare_samples` has any work.
bool compares_samples();

/// Compares the arguments of a microbatch with those on the other ranks of the
/// tensor-parallel group, which must be equal (R58): sizes, types and a sample
/// of evenly spaced numbers. Inside a step body.
/// @throws error (user_code) naming the ranks
void compare_samples(const packer& arguments, form_comparison& compared);

/// @param count number of arguments of the step
/// @throws error (config) if the options name an argument that it does not
/// have, or give an axis to one that is not split
void check_positions(const step_options& x, size_t count);

/// @returns a function that tells whether any of `xs` was written since
std::function<bool()> written_since(const std::vector<at::Tensor>& xs);

/// Adds the position of the argument to an error of `split`.
[[noreturn]] void bad_argument(size_t position, const error& err);

/// Tells whether the calling step body's modules compute elsewhere than on the
/// host.
bool computes_on_device();

/// @returns the tensors on the device of the rank that runs the step body
std::vector<at::Tensor> on_device(std::vector<at::Tensor> xs);

/// @returns `x` with its tensors on the device of the rank.
template <class T>
T placed(T x) {
  if constexpr (packable<T>) {
    if (computes_on_device()) {
      packer tensors;
      auto packed = put_value(tensors, x);
      unpacker there{on_device(tensors.tensors())};
      return get_value<T>(there, packed);
    }
  }
  return x;
}

template <class T>
T split_argument(const T& x, const step_options& options, size_t position,
                 uint64_t n, uint64_t index) {
  if (options.non_split_inputs.contains(position))
    return placed(x);
  auto axis = options.input_split_axes.find(position);
  try {
    return placed(split(
      x, n, index, axis == options.input_split_axes.end() ? 0 : axis->second));
  } catch (const error& err) {
    bad_argument(position, err);
  }
}

} // namespace detail

/// A training or evaluation step over microbatches, made by `smp::step`.
template <class F>
class step_function {
public:
  step_function(F f, step_options options)
    : f_(std::move(f)), options_(std::move(options)) {
    // nop
  }

  /// Runs the body once per microbatch on pp_rank 0 (its side effects happen
  /// only there, R5), and modules on their owners. All ranks of the pipeline
  /// group call this; arguments on ranks other than pp_rank 0 are ignored and
  /// may be undefined tensors.
  /// @returns the results of the bodies, the same on all ranks
  /// @throws error, the same on all ranks; the session stays usable after an
  /// error in user code, not after the loss of a rank (R6)
  template <class... Ts>
  auto operator()(const Ts&... xs) {
    return run(std::index_sequence_for<Ts...>{}, xs...);
  }

  /// Takes part in a step of other replicas with no samples of its own, as if
  /// all gradients were zero. All ranks of the pipeline group call this, and so
  /// do the ranks that share modules with them.
  /// @throws error (unsupported) before the model is partitioned, (protocol) if
  /// ranks that share modules run the step; else as a step
  void skip() {
    detail::skip_step();
  }

private:
  template <size_t... Is, class... Ts>
  auto run(std::index_sequence<Is...>, const Ts&... xs) {
    using result = std::invoke_result_t<F&, Ts&...>;
    detail::check_positions(options_, sizeof...(Ts));
    auto n = options_.microbatches.value_or(
      session::current().config().microbatches);
    auto body = [&](packer& out, [[maybe_unused]] uint64_t index,
                    form_comparison& compared) -> value {
      std::tuple<Ts...> parts{
        detail::split_argument<Ts>(xs, options_, Is, n, index)...};
      if (detail::compares_samples()) {
        packer arguments;
        put_all(arguments, std::get<Is>(parts)...);
        detail::compare_samples(arguments, compared);
      }
      if constexpr (std::is_void_v<result>) {
        f_(std::get<Is>(parts)...);
        return value::none();
      } else {
        return put_value<std::decay_t<result>>(out, f_(std::get<Is>(parts)...));
      }
    };
    packer inputs;
    put_all(inputs, xs...);
    step_call call{n, signature(xs...), options_.no_rerun,
                   detail::written_since(inputs.tensors())};
    auto results = detail::run_step(call, body, options_.detach_outputs);
    if constexpr (std::is_void_v<result>)
      return step_output<void>{};
    else
      return step_output<std::decay_t<result>>{std::move(results)};
  }

  template <class... Ts>
  uint64_t signature(const Ts&... xs) const {
    if (!detail::needs_signature())
      return 0;
    packer arguments;
    put_all(arguments, xs...);
    return detail::signature(detail::identity(f_), arguments);
  }

  template <class... Ts>
  static void put_all(packer& to, const Ts&... xs) {
    [[maybe_unused]] auto add = [&to]<class T>(const T& x) {
      if constexpr (packable<T>)
        put_value(to, x);
    };
    (add(xs), ...);
  }

  F f_;
  step_options options_;
};

/// Makes a step from `f`. The body may capture anything of the caller by
/// reference; it runs on other threads, one at a time.
template <class F>
step_function<std::decay_t<F>> step(F&& f, step_options options = {}) {
  return {std::forward<F>(f), std::move(options)};
}

} // namespace smp
