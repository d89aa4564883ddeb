#include "runtime/intercept/trace/result_tracker.hpp"

#include "runtime/base/here.hpp"

#include <algorithm>
#include <string_view>
#include <utility>

namespace smp {

namespace {

using recorded_values = c10::ArrayRef<const c10::IValue>;

recorded_values recorded_inputs(const at::RecordFunction& f);

/// `RecordFunction::inputs` asserts on a member that only a debug build of
/// LibTorch has, and so fails at random in a program without NDEBUG.
template <recorded_values at::RecordFunction::*Inputs>
struct inputs_without_assert {
  friend recorded_values recorded_inputs(const at::RecordFunction& f) {
    return f.*Inputs;
  }
};

template struct inputs_without_assert<&at::RecordFunction::inputs_>;

} // namespace

// -- what a call got ----------------------------------------------------------

passed_tensors::passed_tensors(std::span<const at::Tensor> xs) {
  for (auto& x : xs)
    if (x.defined() && !x.is_inference()) // those have no version
      entries_.push_back(
        {decltype(entry::tensor){x.getIntrusivePtr()}, x._version()});
}

bool passed_tensors::written() const {
  return std::ranges::any_of(entries_, [](auto& x) {
    auto impl = x.tensor.lock();
    // A tensor that is gone cannot be read.
    return impl && at::Tensor{std::move(impl)}._version() != x.version;
  });
}

bool passed_tensors::any_in(std::span<const at::Tensor> xs) const {
  return std::ranges::any_of(entries_, [xs](auto& x) {
    return std::ranges::any_of(xs, [&x](auto& y) {
      return y.unsafeGetTensorImpl() == x.tensor._unsafe_get_target();
    });
  });
}

// -- what callers do with results ---------------------------------------------

/// An addition of results, whose output counts as a result too.
struct result_tracker::sum : at::ObserverContext {
  explicit sum(entry x) : of(std::move(x)) {
    // nop
  }

  entry of;
};

result_tracker::result_tracker(std::vector<module_trace>& found,
                               std::function<std::optional<module_id>()> where)
  : found_(found), where_(std::move(where)) {
  here::of_thread().tracker = this;
  at::RecordFunctionCallback callback{&on_begin, &on_end};
  callback.needsInputs(true).needsOutputs(true).scopes(
    {at::RecordScope::FUNCTION});
  handle_ = at::addThreadLocalCallback(callback);
}

result_tracker::~result_tracker() {
  at::removeCallback(handle_);
  here::of_thread().tracker = nullptr;
}

void result_tracker::returned(module_id module, module_id caller,
                              std::span<const at::Tensor> xs) {
  last_call_[caller.value] = ++calls_;
  for (auto& x : xs) {
    if (!x.defined())
      continue;
    auto& impl = x.getIntrusivePtr();
    auto [i, added] = known_.try_emplace(
      impl.get(), entry{weak_tensor{impl}, {module}, caller, calls_});
    auto& e = i->second;
    if (added)
      continue;
    auto from_inside = e.caller == module;
    if (from_inside)
      found_[e.modules.back().value].passed_on = true;
    // It may also be an argument, which `caller` had from another call.
    if (!from_inside && e.caller != caller)
      e.modules.clear();
    if (e.modules.empty() || e.modules.back() != module)
      e.modules.push_back(module);
    e.caller = caller;
    e.call = calls_;
  }
}

result_tracker::entry* result_tracker::find(const at::IValue& x,
                                            module_id caller) {
  if (!x.isTensor() || !x.toTensor().defined())
    return nullptr;
  auto i = known_.find(x.toTensor().unsafeGetTensorImpl());
  return i != known_.end() && i->second.caller == caller ? &i->second : nullptr;
}

std::pair<result_tracker::entry*, result_tracker::entry*>
result_tracker::operands(const at::RecordFunction& f, module_id caller) {
  std::pair<entry*, entry*> result{nullptr, nullptr};
  auto add = [&](const at::IValue& x) {
    auto* e = find(x, caller);
    if (e == nullptr || e == result.first)
      return;
    if (result.first == nullptr || e->call > result.first->call)
      result.second = std::exchange(result.first, e);
    else
      result.second = e;
  };
  for (auto& x : recorded_inputs(f))
    if (x.isTensorList())
      for (auto& y : x.toListRef())
        add(y);
    else
      add(x);
  return result;
}

std::unique_ptr<at::ObserverContext>
result_tracker::on_begin(const at::RecordFunction& f) {
  auto* x = here::of_thread().tracker;
  auto caller = x ? x->where_() : std::nullopt;
  if (!caller)
    return nullptr;
  auto [last, other] = x->operands(f, *caller);
  // Results of calls before the last one arrive while that one runs.
  if (last == nullptr || last->call != x->last_call_[caller->value])
    return nullptr;
  auto is_sum = std::string_view{f.name()} == "aten::add" && other != nullptr;
  if (!is_sum) {
    for (auto module : last->modules)
      x->found_[module.value].waited_for = true;
    return nullptr;
  }
  x->found_[last->modules.back().value].added_to.insert(other->modules.back());
  return std::make_unique<sum>(*last);
}

void result_tracker::on_end(const at::RecordFunction& f,
                            at::ObserverContext* context) {
  auto* x = here::of_thread().tracker;
  auto* made = static_cast<sum*>(context);
  if (x == nullptr || made == nullptr)
    return;
  for (auto& output : f.outputs())
    if (output.isTensor() && output.toTensor().defined()) {
      auto& impl = output.toTensor().getIntrusivePtr();
      made->of.tensor = weak_tensor{impl};
      x->known_.insert_or_assign(impl.get(), made->of);
    }
}

} // namespace smp
