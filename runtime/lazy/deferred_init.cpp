#include "runtime/lazy/deferred_init.hpp"

#include "runtime/lazy/boxed_arguments.hpp"
#include "runtime/lazy/delay_param_initialization.hpp"
#include "runtime/base/large_block_allocator.hpp"
#include "runtime/lazy/deferred_recording.hpp"
#include "transport/error.hpp"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/enum_tag.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/TensorImpl.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_set>
#include <utility>

namespace smp {

namespace {

namespace ag = torch::autograd;

// Made for this (torchdistx), free in LibTorch 2.11, above autograd and
// autocast and below what placeholder.cpp uses.
constexpr auto deferred_key = c10::DispatchKey::DeferredInit;

/// Smaller tensors are made at once: a generator's state alone is 2.5 KB. Who
/// reads from a file (script/deferred_script.cpp) knows by itself what pays.
constexpr size_t worth_delaying = 4096;

/// Recording and making are rare, and they use the process's one generator.
std::recursive_mutex& recording_mutex() {
  static auto& result = *new std::recursive_mutex; // outlives all tensors
  return result;
}

class deferred_impl;

/// Memory that does not exist yet, with the tensors that are views of it.
struct future_memory {
  recorded_op_ptr last_write;
  std::vector<deferred_impl*> members;
};

void make(const std::vector<deferred_impl*>& xs);

// -- a tensor without bytes ---------------------------------------------------

/// Knows all about a tensor but its elements. When they are made it turns
/// into an ordinary tensor and stays the same object. Whoever wants its
/// storage without dispatch makes them (`has_storage`, `storage`).
class deferred_impl final : public c10::TensorImpl {
public:
  /// @param twin the same tensor on the meta device
  deferred_impl(at::Tensor twin, recorded_tensor origin,
               std::shared_ptr<future_memory> memory)
    : TensorImpl(c10::DispatchKeySet{c10::DispatchKey::CPU}.add(deferred_key),
                 twin.dtype(), c10::Device{c10::kCPU}),
      twin_(std::move(twin)),
      origin_(std::move(origin)),
      memory_(std::move(memory)) {
    memory_->members.push_back(this);
    refresh();
  }

  ~deferred_impl() override {
    forget();
  }

  bool pending() const noexcept {
    return twin_.defined();
  }

  const at::Tensor& twin() const noexcept {
    return twin_;
  }

  const recorded_tensor& origin() const noexcept {
    return origin_;
  }

  const std::shared_ptr<future_memory>& memory() const noexcept {
    return memory_;
  }

  /// Takes over what an operation did to the twin.
  void refresh() {
    auto allowed = allow_tensor_metadata_change();
    set_allow_tensor_metadata_change(true);
    set_sizes_and_strides(twin_.sizes(), twin_.strides(),
                          twin_.storage_offset());
    set_allow_tensor_metadata_change(allowed);
  }

  /// Becomes an ordinary tensor with the storage of `x`.
  void become(const at::Tensor& x) {
    if (x.sizes() != sizes() || x.dtype() != dtype())
      throw error{error_code::unsupported,
                  "delay_param_initialization: '" + origin_.op->op.schema().name()
                    + "' gave another shape or type than predicted; create "
                      "this tensor in a "
                      "smp::delay_param_initialization{false} scope"};
    forget();
    auto keys = key_set_;
    TensorImpl::shallow_copy_from(x.getIntrusivePtr());
    key_set_ = keys;
  }

  /// Has no bytes and never will.
  void forget() {
    std::unique_lock guard{recording_mutex()};
    if (!pending())
      return;
    std::erase(memory_->members, this);
    memory_.reset();
    origin_ = {};
    twin_.reset();
    key_set_ = key_set_.remove(deferred_key);
  }

  // -- TensorImpl -------------------------------------------------------------

  bool has_storage() const override {
    make_now();
    return TensorImpl::has_storage();
  }

  const c10::Storage& storage() const override {
    make_now();
    return TensorImpl::storage();
  }

  c10::intrusive_ptr<TensorImpl>
  shallow_copy_and_detach(const c10::VariableVersion& version,
                          bool allow_change) const override {
    if (pending())
      return alias(version, allow_change);
    return TensorImpl::shallow_copy_and_detach(version, allow_change);
  }

  c10::intrusive_ptr<TensorImpl>
  shallow_copy_and_detach(c10::VariableVersion&& version,
                          bool allow_change) const override {
    if (pending())
      return alias(version, allow_change);
    return TensorImpl::shallow_copy_and_detach(std::move(version),
                                               allow_change);
  }

  /// What `set_data` does.
  void shallow_copy_from(const c10::intrusive_ptr<TensorImpl>& x) override {
    std::unique_lock guard{recording_mutex()};
    auto* other = dynamic_cast<deferred_impl*>(x.get());
    if (other && other->pending() && pending()) {
      auto source = other->alias(c10::VariableVersion{0}, true);
      take_over(static_cast<deferred_impl&>(*source));
      return;
    }
    if (other)
      other->make_now();
    auto keys = key_set_.remove(deferred_key);
    forget();
    TensorImpl::shallow_copy_from(x);
    key_set_ = keys;
  }

  void release_resources() override {
    forget();
    TensorImpl::release_resources();
  }

  const char* tensorimpl_type_name() const override {
    return "smp::deferred_impl";
  }

private:
  void make_now() const {
    if (pending())
      make({const_cast<deferred_impl*>(this)});
  }

  /// Another tensor with the same elements, now and later.
  c10::intrusive_ptr<deferred_impl> alias(const c10::VariableVersion& version,
                                         bool allow_change) const {
    static const auto detach
      = c10::Dispatcher::singleton().findSchemaOrThrow("aten::detach", "");
    std::unique_lock guard{recording_mutex()};
    delay_param_initialization plain{false};
    auto op = std::make_shared<recorded_op>(detach,
                                            torch::jit::Stack{at::Tensor{}});
    op->holes.push_back({0, 0, origin_});
    op->before.push_back(memory_->last_write);
    auto result = c10::make_intrusive<deferred_impl>(
      twin_.detach(), recorded_tensor{op, 0}, memory_);
    result->set_version_counter(version);
    result->set_allow_tensor_metadata_change(allow_change);
    return result;
  }

  void take_over(deferred_impl& x) {
    std::erase(memory_->members, this);
    memory_ = x.memory_;
    memory_->members.push_back(this);
    origin_ = x.origin_;
    twin_ = x.twin_;
    data_type_ = x.data_type_;
    refresh();
  }

  at::Tensor twin_; // defined while this has no bytes
  recorded_tensor origin_;
  std::shared_ptr<future_memory> memory_;
};

/// @returns the state of `x` if it has no bytes yet, else null
deferred_impl* deferred(const at::Tensor& x) {
  if (!is_deferred(x))
    return nullptr;
  if (auto* impl = dynamic_cast<deferred_impl*>(x.unsafeGetTensorImpl()))
    return impl;
  throw error{error_code::unsupported,
              "delay_param_initialization: an ordinary tensor was made to "
              "share the memory of one that has none yet"};
}

wanted_tensor want(const deferred_impl& x) {
  return {x.origin(), x.memory()->last_write};
}

/// Makes the bytes of `xs` and of all that share their memory.
void make(const std::vector<deferred_impl*>& xs) {
  std::unique_lock guard{recording_mutex()};
  std::vector<deferred_impl*> targets;
  std::unordered_set<const future_memory*> seen;
  for (auto* x : xs)
    if (x->pending() && seen.insert(x->memory().get()).second)
      targets.insert(targets.end(), x->memory()->members.begin(),
                     x->memory()->members.end());
  std::vector<wanted_tensor> wanted;
  for (auto* x : targets)
    wanted.push_back(want(*x));
  replay(wanted, [&](size_t i, at::Tensor x) { targets[i]->become(x); });
}

/// @returns the elements of `x` without keeping them
at::Tensor value_now(const deferred_impl& x) {
  at::Tensor result;
  replay({want(x)}, [&result](size_t, at::Tensor y) { result = y; });
  return result;
}

// -- gradients ----------------------------------------------------------------

/// Stands for the history of what was computed from parameters in the scope.
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

/// Gives `x` the same need of a gradient that its twin has.
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

// -- what an operation does ---------------------------------------------------

using stack = torch::jit::Stack;

/// The arguments of an operation, on top of a stack.
struct boxed_call {
  boxed_call(const c10::OperatorHandle& op, torch::jit::Stack& s)
    : op(op),
      schema(op.schema()),
      name(schema.name()),
      all(s),
      base(s.size() - schema.arguments().size()) {
    // nop
  }

  size_t size() const {
    return schema.arguments().size();
  }

  c10::IValue& operator[](size_t i) const {
    return all[base + i];
  }

  bool writes(size_t i) const {
    auto* alias = schema.arguments()[i].alias_info();
    return alias && alias->isWrite();
  }

  /// Whether its result may be a view of that argument, or itself.
  bool aliases(size_t i) const {
    return schema.arguments()[i].alias_info() != nullptr;
  }

  /// Calls `f(i, tensor)`.
  template <class F>
  void visit(F f) const {
    for (size_t i = 0; i < size(); ++i)
      visit_tensors((*this)[i], [&](const at::Tensor& x) { f(i, x); });
  }

  stack arguments() const {
    return {all.begin() + static_cast<std::ptrdiff_t>(base), all.end()};
  }

  void finish(stack results) const {
    all.resize(base);
    for (auto& x : results)
      all.push_back(std::move(x));
  }

  const c10::OperatorHandle& op;
  const c10::FunctionSchema& schema;
  const std::string& name;
  torch::jit::Stack& all;
  size_t base;
};

template <size_t N>
bool is_one_of(const std::string& x,
               const std::array<std::string_view, N>& names) {
  return std::find(names.begin(), names.end(), x) != names.end();
}

/// These look at and change what a tensor without bytes has.
bool needs_no_bytes(const std::string& name) {
  static constexpr std::array<std::string_view, 8> names = {
    "aten::requires_grad_", "aten::retain_grad", "aten::is_leaf",
    "aten::output_nr",      "aten::_version",    "aten::set_data",
    "aten::data",           "aten::_has_compatible_shallow_copy_type",
  };
  return reads_metadata_only(name) || is_one_of(name, names);
}

/// These change an argument that their schema calls unchanged, or exchange
/// storages.
bool changes_more_than_it_says(const std::string& name) {
  static constexpr std::array<std::string_view, 6> names = {
    "aten::batch_norm",    "aten::_batch_norm_impl_index",
    "aten::instance_norm", "aten::native_batch_norm",
    "aten::set_",          "aten::cudnn_batch_norm",
  };
  return is_one_of(name, names);
}

bool is_random(const boxed_call& x) {
  if (x.op.hasTag(at::Tag::nondeterministic_seeded))
    return true;
  for (auto& argument : x.schema.arguments())
    if (argument.name() == "generator")
      return true;
  return false;
}

/// Whether how much it draws depends on sizes and types only.
bool draws_by_size(const std::string& name) {
  static constexpr std::array<std::string_view, 11> names = {
    "aten::normal_",     "aten::uniform_",   "aten::random_",
    "aten::bernoulli_",  "aten::geometric_", "aten::exponential_",
    "aten::log_normal_", "aten::cauchy_",    "aten::randn_like",
    "aten::rand_like",   "aten::randint_like",
  };
  return is_one_of(name, names);
}

// -- sizes and types of results -----------------------------------------------

/// An operation tried on the meta device, which has no bytes.
class trial {
public:
  /// @returns false if only values can tell the result
  bool run(const boxed_call& x) {
    for (auto& result : x.schema.returns())
      if (!result.type()->isSubtypeOf(*c10::TensorType::get())
          && !result.type()->isSubtypeOf(*c10::ListType::ofTensors()))
        return false;
    auto arguments = x.arguments();
    for (size_t i = 0; i < arguments.size(); ++i)
      if (!prepare(x.schema.arguments()[i].name(), arguments[i]))
        return false;
    try {
      call_boxed(x.op, arguments);
    } catch (const std::exception&) {
      // Made for real, it either works or throws the right error.
      return false;
    }
    results_ = std::move(arguments);
    return std::ranges::all_of(flatten_tensors(results_), [&](auto& y) {
      return !y.defined() || is_ours(y);
    });
  }

  const stack& results() const {
    return results_;
  }

  /// @returns the deferred argument that `twin` stands for, or nothing.
  at::Tensor find(const at::Tensor& twin) const {
    for (auto& x : arguments_)
      if (deferred(x)->twin().is_same(twin))
        return x;
    return {};
  }

  /// @returns a deferred argument with the memory of `twin`, or nothing.
  at::Tensor find_base(const at::Tensor& twin) const {
    for (auto& x : arguments_)
      if (deferred(x)->twin().storage().is_alias_of(twin.storage()))
        return x;
    return {};
  }

private:
  bool prepare(const std::string& name, c10::IValue& x) {
    if (x.isDevice() || (name == "device" && x.isNone())) {
      if (x.isDevice() && x.toDevice().type() != c10::kCPU)
        return false;
      x = c10::Device{c10::kMeta};
    } else if (x.isGenerator()) {
      x = c10::IValue{};
    } else if (name == "pin_memory" && x.isBool() && x.toBool()) {
      return false;
    }
    bool possible = true;
    visit_tensors(x, [&](const at::Tensor& t) {
      possible = possible && t.device().is_cpu() && t.layout() == c10::kStrided
                 && !t.is_nested() && !t.is_conj() && !t.is_neg()
                 && !t._is_zerotensor() && !t.is_quantized();
    });
    if (possible)
      replace_tensors(x, [this](const at::Tensor& t) { return twin_of(t); });
    return possible;
  }

  at::Tensor twin_of(const at::Tensor& x) {
    if (auto* impl = deferred(x)) {
      arguments_.push_back(x);
      auto& twin = impl->twin();
      if (twin.is_leaf() && x.is_leaf()
          && twin.requires_grad() != x.requires_grad())
        twin.set_requires_grad(x.requires_grad());
      return twin;
    }
    // Numbers rank below tensors when types are promoted.
    if (x.unsafeGetTensorImpl()->is_wrapped_number())
      return x;
    auto result = at::empty_strided(x.sizes(), x.strides(),
                                    x.options().device(c10::kMeta));
    result.set_requires_grad(x.requires_grad());
    others_.push_back(result);
    return result;
  }

  /// Not what shares the memory of an ordinary argument.
  bool is_ours(const at::Tensor& x) const {
    return x.is_meta() && x.layout() == c10::kStrided && !x.is_nested()
           && !x.is_conj() && !x.is_neg() && !x._is_zerotensor()
           && std::ranges::none_of(others_, [&x](auto& y) {
                return y.storage().is_alias_of(x.storage());
              });
  }

  std::vector<at::Tensor> arguments_; // the deferred ones
  std::vector<at::Tensor> others_;    // stand for the ordinary ones
  stack results_;
};

// -- recording ----------------------------------------------------------------

/// A copy: the program may change its tensor afterwards, even through a
/// pointer that it got before.
at::Tensor constant(const at::Tensor& x) {
  c10::AutoGradMode no_grad{false};
  auto result = x.clone();
  if (x.unsafeGetTensorImpl()->is_wrapped_number())
    result.unsafeGetTensorImpl()->set_wrapped_number(true);
  return result;
}

/// Moves the generator on as if `x` had run.
void draw(const boxed_call& x) {
  c10::AutoGradMode no_grad{false};
  large_block_allocator apart;
  auto by_size = draws_by_size(x.name);
  auto arguments = x.arguments();
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

recorded_op_ptr record(const boxed_call& x) {
  auto result = std::make_shared<recorded_op>(x.op, x.arguments());
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
      result->numbers
        = std::make_unique<random_stream>(random_stream::of_default());
    draw(x);
  }
  return result;
}

/// Records the operation instead of running it.
/// @returns false, having done nothing, if it must run
bool try_record(const boxed_call& x) {
  bool any = false, writes_ordinary = false;
  x.visit([&](size_t i, const at::Tensor& t) {
    if (deferred(t))
      any = true;
    else if (x.writes(i))
      writes_ordinary = true;
  });
  trial tried;
  if (writes_ordinary || changes_more_than_it_says(x.name) || !tried.run(x))
    return false;
  if (!any) {
    size_t bytes = 0;
    bool with_history = false;
    for (auto& y : flatten_tensors(tried.results()))
      if (y.defined()) {
        bytes += y.nbytes();
        with_history |= y.requires_grad();
      }
    if ((bytes <= worth_delaying && x.name != "smp::read_storage")
        || with_history)
      return false;
  }
  auto op = record(x);
  x.visit([&](size_t i, const at::Tensor& t) {
    if (!x.writes(i))
      return;
    auto* impl = deferred(t);
    impl->memory()->last_write = op;
    impl->bump_version();
    impl->refresh();
    take_over_history(t);
  });
  uint32_t index = 0;
  std::vector<at::Tensor> made;
  auto wrap = [&](const at::Tensor& twin) {
    auto at_index = index++;
    if (auto same = tried.find(twin); same.defined())
      return same;
    auto base = tried.find_base(twin);
    for (auto& y : made)
      if (!base.defined()
          && deferred(y)->twin().storage().is_alias_of(twin.storage()))
        base = y;
    auto memory = base.defined() ? deferred(base)->memory()
                                 : std::make_shared<future_memory>(op);
    auto result = at::detail::make_tensor<deferred_impl>(
      twin, recorded_tensor{op, at_index}, std::move(memory));
    if (base.defined())
      result.unsafeGetTensorImpl()->set_version_counter(
        ag::impl::version_counter(base));
    take_over_history(result);
    made.push_back(result);
    return result;
  };
  auto results = tried.results();
  for (auto& result : results) {
    // As `flatten_tensors` counts, which includes undefined ones.
    if (result.isTensor() && !result.toTensor().defined())
      ++index;
    else
      replace_tensors(result, wrap);
  }
  x.finish(std::move(results));
  return true;
}

// -- running for real ---------------------------------------------------------

/// Gives `x` the values that it needs. Values that were only read are not
/// kept inside of the scope.
void make_arguments(const boxed_call& x, bool keep) {
  std::vector<deferred_impl*> kept;
  x.visit([&](size_t i, const at::Tensor& t) {
    auto* impl = deferred(t);
    if (impl
        && (keep || x.aliases(i) || changes_more_than_it_says(x.name)
            || (t.requires_grad() && c10::GradMode::is_enabled())))
      kept.push_back(impl);
  });
  make(kept);
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

/// Outside of the scope, initialisers go on being recorded.
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
  // What this calls, and what the operation calls, is not for the record.
  delay_param_initialization plain{false};
  {
    std::unique_lock guard{recording_mutex()};
    if (x.name == "aten::_has_compatible_shallow_copy_type") {
      // The first thing that set_data does. An ordinary tensor can only take
      // what has bytes.
      if (!is_deferred(x[0].toTensor()))
        make_arguments(x, true);
    } else if (!needs_no_bytes(x.name)) {
      auto ordinary = c10::InferenceMode::is_enabled()
                      || !(inside || only_initialises(x));
      if (!ordinary && try_record(x))
        return;
      if (any)
        make_arguments(x, ordinary);
    }
  }
  redispatch_boxed(op,
                   keys
                     & c10::DispatchKeySet{c10::DispatchKeySet::FULL_AFTER,
                                           deferred_key},
                   *s);
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
  make(todo);
}

void forget_deferred(const at::Tensor& x) {
  if (auto* impl = deferred(x))
    impl->forget();
}

} // namespace smp

TORCH_LIBRARY_IMPL(_, DeferredInit, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&smp::intercept>());
}
