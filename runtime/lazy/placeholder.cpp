#include "runtime/lazy/placeholder.hpp"

#include "runtime/base/rank_context.hpp"
#include "runtime/deferred/boxed_arguments.hpp"
#include "runtime/deferred/deferred_init.hpp"
#include "runtime/lazy/late_logits.hpp"
#include "runtime/lazy/late_value.hpp"
#include "runtime/lazy/promise.hpp"
#include "transport/error.hpp"

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/Allocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/TensorImpl.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/library.h>

#include <algorithm>
#include <vector>

namespace smp {

namespace {

std::shared_ptr<model_context> model_of_rank() {
  auto result = rank_context::current_model();
  if (!result)
    throw error{error_code::unsupported,
                "a parameter that another rank owned is used after its session "
                "or model ended"};
  return result;
}

/// In training, normalisations change running statistics, which their
/// schemas do not declare.
bool writes_statistics(const c10::FunctionSchema& schema,
                       at::ArrayRef<c10::IValue> args) {
  if (schema.name().find("_norm") == std::string::npos)
    return false;
  for (size_t i = 0; i < args.size(); ++i) {
    auto& name = schema.arguments()[i].name();
    if ((name == "training" || name == "train" || name == "use_input_stats")
        && args[i].isBool())
      return args[i].toBool();
  }
  return false;
}

/// The arguments of one operation, with fetched values in place of
/// what other ranks own.
class fetched_arguments {
public:
  fetched_arguments(const c10::FunctionSchema& schema, torch::jit::Stack* stack)
    : schema_(schema), stack_(*stack) {
    auto& args = schema.arguments();
    auto base = stack->size() - args.size();
    auto statistics = writes_statistics(
      schema, at::ArrayRef<c10::IValue>(stack->data() + base, args.size()));
    for (size_t i = 0; i < args.size(); ++i) {
      auto* alias = args[i].alias_info();
      auto writes = (alias && alias->isWrite())
                    || (statistics && args[i].name().starts_with("running_"));
      replace((*stack)[base + i], writes);
    }
  }

  /// After the operation: sends changes to the owners. Where the operation
  /// returned a changed buffer, its placeholder becomes the result again.
  void write_back() {
    for (auto& x : written_) {
      x.model->placeholders->store(x.index, x.value);
      auto results = schema_.returns().size();
      for (auto i = stack_.size() - results; i < stack_.size(); ++i)
        if (stack_[i].isTensor() && stack_[i].toTensor().is_same(x.value))
          stack_[i] = x.placeholder;
    }
  }

private:
  struct written_buffer {
    std::shared_ptr<model_context> model;
    uint32_t index;
    at::Tensor placeholder;
    at::Tensor value;
  };

  void replace(c10::IValue& x, bool writes) {
    bool any = false;
    visit_tensors(x, [&any](const at::Tensor& t) { any |= is_placeholder(t); });
    if (any)
      replace_tensors(x,
                      [&](const at::Tensor& t) { return resolve(t, writes); });
  }

  at::Tensor resolve(const at::Tensor& t, bool writes) {
    if (!is_placeholder(t))
      return t;
    auto model = model_of_rank();
    auto& source = *model->placeholders;
    auto index = source.position(t);
    auto is_buffer = source.is_buffer(index);
    if (writes && !is_buffer)
      source.refuse_write(index, schema_.name());
    auto result = source.fetch(index);
    if (writes)
      written_.push_back({std::move(model), index, t, result});
    else if (is_buffer && makes_alias())
      source.lend(index, result);
    return result;
  }

  /// Whether a result may be a view of the buffer, to be written into later.
  bool makes_alias() const {
    auto& xs = schema_.returns();
    return std::any_of(xs.begin(), xs.end(),
                       [](auto& x) { return x.alias_info() != nullptr; });
  }

  const c10::FunctionSchema& schema_;
  torch::jit::Stack& stack_;
  std::vector<written_buffer> written_;
};

void fetch_arguments(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                     torch::jit::Stack* stack) {
  auto after = c10::DispatchKeySet{c10::DispatchKeySet::FULL_AFTER, absent_key};
  if (reads_metadata_only(op.operator_name().name)) {
    redispatch_boxed(op, keys & after, *stack);
    return;
  }
  if (run_without_logits(op, *stack))
    return;
  auto count = op.schema().arguments().size();
  auto given = at::ArrayRef<c10::IValue>(
    stack->data() + (stack->size() - count), count);
  for (auto& x : given)
    visit_tensors(x, await_late);
  if (auto model = rank_context::current_model();
      model && model->placeholders->run_at_owner(op, *stack))
    return;
  keep_promises(given);
  fetched_arguments args{op.schema(), stack};
  redispatch_boxed(op, keys & after, *stack);
  args.write_back();
}

} // namespace

void make_placeholder(const at::Tensor& x,
                      const std::shared_ptr<torch::autograd::Node>& gradient) {
  forget_deferred(x);
  auto* impl = x.unsafeGetTensorImpl();
  // User code makes tensors where the parameter seems to be.
  auto device = rank_context::current_device();
  c10::DeviceGuard on{device};
  auto nothing = c10::Storage{c10::Storage::use_byte_size_t{}, 0,
                              c10::GetAllocator(device.type()), true};
  x.mutable_grad() = at::Tensor{};
  impl->set_storage_keep_dtype(std::move(nothing));
  impl->_change_backend_component_keys(device);
  if (gradient) {
    gradient->add_input_metadata(x);
    auto trainable = x.requires_grad();
    torch::autograd::impl::materialize_autograd_meta(x)->grad_fn_.reset();
    x.set_requires_grad(trainable);
    torch::autograd::impl::set_grad_accumulator(x, gradient);
  }
  impl->*key_access::key_set() = impl->key_set().add(absent_key);
}

bool is_placeholder(const at::Tensor& x) {
  return is_absent(x) && !is_promise(x) && !is_late(x);
}

at::Tensor materialise(const at::Tensor& x) {
  if (is_promise(x))
    keep_promises(std::vector{x});
  if (!is_placeholder(x))
    return x;
  auto& source = *model_of_rank()->placeholders;
  return source.fetch(source.position(x));
}

} // namespace smp

TORCH_LIBRARY_IMPL(_, TESTING_ONLY_GenericWrapper, m) {
  m.fallback(
    torch::CppFunction::makeFromBoxedFunction<&smp::fetch_arguments>());
}
