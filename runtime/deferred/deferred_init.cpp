#include "runtime/deferred/deferred_init.hpp"

#include "runtime/base/large_block_allocator.hpp"
#include "runtime/deferred/boxed_arguments.hpp"
#include "runtime/deferred/boxed_call.hpp"
#include "runtime/deferred/deferred_tensor.hpp"
#include "runtime/deferred/delay_param_initialization.hpp"
#include "runtime/deferred/drawn_rows.hpp"
#include "runtime/deferred/meta_trial.hpp"
#include "transport/error.hpp"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/library.h>

#include <string>
#include <utility>

namespace smp {

namespace {

namespace ag = torch::autograd;

/// Smaller tensors are made at once: a generator's state alone is 2.5 KB. The
/// reader of files (deferred_script.cpp) has a limit of its own.
constexpr size_t worth_deferring = 4096;

// -- gradients ----------------------------------------------------------------

/// Replaces the history of what is computed from parameters in the scope.
class no_history : public ag::Node {
public:
  std::string name() const override {
    return "smp::delay_param_initialization";
  }

  ag::variable_list apply(ag::variable_list&&) override {
    throw error{error_code::unsupported,
                "backward through a tensor that was computed from parameters "
                "inside of smp::delay_param_initialization; compute it in "
                "forward, or under torch::NoGradGuard"};
  }
};

/// Gives `x` a grad_fn if its twin has one, else removes that of `x`.
void take_over_history(const at::Tensor& x) {
  auto& twin = deferred(x)->twin();
  if (twin.is_leaf() == x.is_leaf())
    return;
  if (twin.is_leaf()) {
    ag::impl::get_autograd_meta(x)->grad_fn_.reset();
    return;
  }
  auto node = std::shared_ptr<ag::Node>(new no_history, ag::deleteNode);
  auto nr = node->add_input_metadata(x);
  ag::impl::set_gradient_edge(x, {node, nr});
}

// -- capturing ----------------------------------------------------------------

/// Copies `x`: the program may change its tensor afterwards, even through a
/// pointer that it got before.
at::Tensor constant(const at::Tensor& x) {
  c10::AutoGradMode no_grad{false};
  auto result = x.clone();
  if (x.unsafeGetTensorImpl()->is_wrapped_number())
    result.unsafeGetTensorImpl()->set_wrapped_number(true);
  return result;
}

/// Advances the generator as if `x` had run.
void draw(const boxed_call& x) {
  c10::AutoGradMode no_grad{false};
  large_block_allocator apart;
  auto by_size = draws_by_size(x.name);
  auto arguments = x.arguments();
  if (auto to = arguments.front(); fills_in_order(x.name) && to.isTensor()
                                   && is_deferred(to.toTensor())
                                   && to.toTensor().is_contiguous()) {
    auto& t = to.toTensor();
    for_each_piece(t.numel(), 1, [&](int64_t, int64_t length) {
      auto stack = arguments;
      stack.front() = at::empty({length}, t.options());
      call_boxed(x.op, stack);
    });
    return;
  }
  for (auto& argument : arguments)
    replace_tensors(argument, [&](const at::Tensor& t) {
      auto* impl = deferred(t);
      if (!impl)
        return t;
      return by_size ? at::empty_strided(t.sizes(), t.strides(), t.options())
                     : value_now(*impl);
    });
  call_boxed(x.op, arguments);
}

captured_op_ptr capture(const boxed_call& x) {
  auto result = std::make_shared<captured_op>(x.op, x.arguments());
  auto& default_generator = at::detail::getDefaultCPUGenerator();
  auto random = is_random(x);
  auto own_generator = false;
  for (uint32_t i = 0; i < x.size(); ++i) {
    auto& argument = result->arguments[i];
    if (argument.isGenerator()) {
      auto generator = argument.toGenerator();
      if (generator.defined() && generator != default_generator) {
        own_generator = true;
        argument = generator.clone();
      } else {
        argument = c10::IValue{};
      }
      continue;
    }
    uint32_t element = 0;
    auto take = [&](const at::Tensor& t) {
      if (auto* impl = deferred(t)) {
        result->holes.push_back({i, element, impl->origin()});
        result->before.push_back(impl->memory()->last_write);
        ++element;
        return at::Tensor{};
      }
      ++element;
      return constant(t);
    };
    replace_tensors(argument, take);
  }
  if (random) {
    if (!own_generator)
      result->numbers = std::make_unique<random_stream>(
        random_stream::of_default());
    draw(x);
  }
  return result;
}

/// Whether to defer what an operation without deferred arguments makes.
bool is_worth_deferring(const boxed_call& x, const meta_trial& tried) {
  size_t bytes = 0;
  for (auto& y : flatten_tensors(tried.results())) {
    if (!y.defined())
      continue;
    if (y.requires_grad()) // it has a history
      return false;
    bytes += y.nbytes();
  }
  return bytes > worth_deferring || x.name == "smp::read_storage";
}

/// Below autograd, as inside a factory function, versions are not counted.
bool counts_writes() {
  return !c10::impl::tls_is_dispatch_key_excluded(
    c10::DispatchKey::ADInplaceOrView);
}

/// Makes `op` the last write of the deferred arguments that it writes.
void note_writes(const boxed_call& x, const captured_op_ptr& op) {
  x.visit([&](size_t i, const at::Tensor& t) {
    if (!x.writes(i))
      return;
    auto* impl = deferred(t);
    impl->memory()->last_write = op;
    if (counts_writes())
      impl->bump_version();
    impl->refresh();
    take_over_history(t);
  });
}

/// Deferred tensors in place of what the trial on the meta device returned.
class wrapped_results {
public:
  wrapped_results(const meta_trial& tried, captured_op_ptr op)
    : tried_(tried), op_(std::move(op)), results_(tried.results()) {
    uint32_t index = 0;
    for (auto& result : results_) {
      // As `flatten_tensors` counts, which includes undefined ones.
      if (result.isTensor() && !result.toTensor().defined())
        ++index;
      else
        replace_tensors(
          result, [&](const at::Tensor& twin) { return wrap(twin, index++); });
    }
  }

  torch::jit::Stack take() {
    return std::move(results_);
  }

private:
  at::Tensor wrap(const at::Tensor& twin, uint32_t index) {
    if (auto same = tried_.find(twin); same.defined())
      return same;
    auto base = find_base(twin);
    auto memory = base.defined() ? deferred(base)->memory()
                                 : std::make_shared<future_memory>(op_);
    auto result = at::detail::make_tensor<deferred_impl>(
      twin, captured_tensor{op_, index}, std::move(memory));
    if (base.defined())
      result.unsafeGetTensorImpl()->set_version_counter(
        ag::impl::version_counter(base));
    take_over_history(result);
    made_.push_back(result);
    return result;
  }

  /// @returns a tensor, argument or result, with the memory of `twin`
  at::Tensor find_base(const at::Tensor& twin) const {
    if (auto result = tried_.find_base(twin); result.defined())
      return result;
    for (auto& x : made_)
      if (deferred(x)->twin().storage().is_alias_of(twin.storage()))
        return x;
    return {};
  }

  const meta_trial& tried_;
  captured_op_ptr op_;
  torch::jit::Stack results_;
  std::vector<at::Tensor> made_;
};

/// Captures the operation instead of running it.
/// @returns false, having done nothing, if it must run
bool try_capture(const boxed_call& x) {
  bool any = false;
  bool writes_ordinary = false;
  x.visit([&](size_t i, const at::Tensor& t) {
    if (deferred(t))
      any = true;
    else if (x.writes(i))
      writes_ordinary = true;
  });
  meta_trial tried;
  if (writes_ordinary || changes_more_than_it_says(x.name) || !tried.run(x)
      || (!any && !is_worth_deferring(x, tried)))
    return false;
  auto op = capture(x);
  note_writes(x, op);
  x.finish(wrapped_results{tried, op}.take());
  return true;
}

// -- running for real ---------------------------------------------------------

/// Computes the deferred values among the arguments of `x`. Inside the scope,
/// values that are only read are not kept.
void make_arguments(const boxed_call& x, bool keep) {
  std::vector<deferred_impl*> kept;
  x.visit([&](size_t i, const at::Tensor& t) {
    auto* impl = deferred(t);
    if (impl
        && (keep || x.aliases(i) || changes_more_than_it_says(x.name)
            || (t.requires_grad() && c10::GradMode::is_enabled())))
      kept.push_back(impl);
  });
  make_bytes(kept);
  for (size_t i = 0; i < x.size(); ++i) {
    bool any = false;
    visit_tensors(x[i], [&any](auto& t) { any |= is_deferred(t); });
    if (any)
      replace_tensors(x[i], [](const at::Tensor& t) {
        auto* impl = deferred(t);
        return impl ? value_now(*impl) : t;
      });
  }
}

/// Outside of the scope, only initialisers are captured.
bool only_initialises(const boxed_call& x) {
  bool result = true;
  x.visit([&](size_t i, const at::Tensor& t) {
    if (is_deferred(t))
      result = result && x.aliases(i)
               && !(c10::GradMode::is_enabled() && t.requires_grad());
  });
  return result;
}

void intercept(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
               torch::jit::Stack* s) {
  boxed_call x{op, *s};
  bool any = false;
  x.visit([&any](size_t, const at::Tensor& t) { any |= is_deferred(t); });
  auto inside = in_deferred_scope();
  const auto below = keys
                     & c10::DispatchKeySet{c10::DispatchKeySet::FULL_AFTER,
                                           deferred_key};
  if (inside && makes_and_fills(x.name)) { // both steps are captured
    redispatch_boxed(op, below, *s);
    return;
  }
  // What this or the operation calls is not captured.
  delay_param_initialization plain{false};
  {
    std::unique_lock guard{capture_mutex()};
    if (x.name == "aten::_has_compatible_shallow_copy_type") {
      // The first call of set_data. An ordinary tensor can only take over a
      // tensor that has bytes.
      if (!is_deferred(x[0].toTensor()))
        make_arguments(x, true);
    } else if (!needs_no_bytes(x.name)) {
      auto ordinary = c10::InferenceMode::is_enabled()
                      || !(inside || only_initialises(x));
      if (!ordinary && try_capture(x))
        return;
      if (any)
        make_arguments(x, ordinary);
    }
  }
  redispatch_boxed(op, below, *s);
}

} // namespace

// -- the scope ----------------------------------------------------------------

delay_param_initialization::delay_param_initialization(bool enabled)
  : before_(in_deferred_scope()) {
  c10::impl::tls_set_dispatch_key_included(deferred_key, enabled);
}

delay_param_initialization::~delay_param_initialization() {
  c10::impl::tls_set_dispatch_key_included(deferred_key, before_);
}

// -- for the partition --------------------------------------------------------

bool in_deferred_scope() {
  return c10::impl::tls_is_dispatch_key_included(deferred_key);
}

bool is_deferred(const at::Tensor& x) {
  return x.defined() && x.key_set().has(deferred_key);
}

void initialise_deferred(const std::vector<at::Tensor>& xs) {
  std::vector<deferred_impl*> todo;
  for (auto& x : xs)
    if (auto* impl = deferred(x))
      todo.push_back(impl);
  make_bytes(todo);
}

void forget_deferred(const at::Tensor& x) {
  if (auto* impl = deferred(x))
    impl->forget();
}

} // namespace smp

TORCH_LIBRARY_IMPL(_, DeferredInit, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&smp::intercept>());
}
