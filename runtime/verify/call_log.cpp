#include "runtime/verify/call_log.hpp"

#include "runtime/base/rank_context.hpp"
#include "runtime/execution/running_call.hpp"
#include "runtime/lazy/placeholder.hpp"
#include "runtime/lazy/promise.hpp"
#include "runtime/model/model_map.hpp"

#include <ATen/SequenceNumber.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/function.h>

#include <algorithm>
#include <utility>

namespace smp {

namespace {

/// A call while it is logged.
struct open_call {
  const void* object = nullptr;
  /// To tell passed-on tensors from results; alive during the call.
  std::vector<const void*> arguments;
  bool ended = false;
  logged_call log;
};

/// Tells whether `x` is a parameter of which this rank has a slice.
bool is_slice(const at::Tensor& x) {
  auto model = rank_context::current_model();
  auto i = model ? model->map->model().find(x) : -1;
  return i >= 0 && model->map->slice(static_cast<uint32_t>(i)) != nullptr;
}

/// Nothing for parameters of other ranks, which reading would fetch, and those
/// that ranks share, which traces pass to modules. A promise is left alone: the
/// rank that computes its content logs it.
std::optional<tensor_digest> digest_if_here(const at::Tensor& x) {
  if (!x.defined() || is_placeholder(x) || is_promise(x) || is_slice(x))
    return std::nullopt;
  return digest_of(x);
}

} // namespace

struct call_logger::state {
  std::mutex mutex;
  uint64_t microbatch = 0;
  uint64_t events = 0;
  uint64_t gradients = 0;
  std::vector<std::shared_ptr<open_call>> calls;
  std::vector<std::shared_ptr<logged_pass>> passes;
  /// The calls in progress, by thread, innermost last.
  std::map<std::thread::id, std::vector<uint32_t>> running;
  std::map<std::pair<uint64_t, const void*>, uint64_t> counts;
  /// The nested calls that returned a tensor. The weak pointer keeps the
  /// address from being reused for another tensor, but not the data alive.
  struct origin {
    std::vector<uint32_t> calls;
    c10::weak_intrusive_ptr<c10::TensorImpl> tensor;
  };
  std::map<const void*, origin> origins;

  void clear() {
    calls.clear();
    passes.clear();
    running.clear();
    counts.clear();
    origins.clear();
    events = 0;
    gradients = 0;
  }

  uint64_t current_microbatch() const {
    auto* ex = running_call::current();
    return ex ? ex->microbatch().value : microbatch;
  }

  /// @returns the call of this thread that ends, or null
  std::shared_ptr<open_call> pop(const void* object) {
    auto& stack = running[std::this_thread::get_id()];
    if (stack.empty() || calls[stack.back()]->object != object)
      return nullptr;
    auto result = calls[stack.back()];
    stack.pop_back();
    return result;
  }
};

call_logger::call_logger() : state_(std::make_shared<state>()) {
  // nop
}

call_logger::~call_logger() = default;

void call_logger::set_microbatch(uint64_t x) {
  std::unique_lock guard{state_->mutex};
  state_->microbatch = x;
}

observed_step call_logger::take(
  const std::function<std::optional<std::string>(const void*)>& name) {
  std::unique_lock guard{state_->mutex};
  observed_step result;
  std::vector<std::optional<uint32_t>> positions;
  for (auto& x : state_->calls) {
    positions.emplace_back();
    auto path = name(x->object);
    if (!x->ended || !path)
      continue;
    positions.back() = static_cast<uint32_t>(result.calls.size());
    x->log.module = std::move(*path);
    result.calls.push_back(std::move(x->log));
  }
  for (auto& x : result.calls) {
    if (x.outer)
      x.outer = positions[*x.outer];
    std::vector<uint32_t> users;
    for (auto i : x.used_by)
      if (positions[i])
        users.push_back(*positions[i]);
    x.used_by = std::move(users);
  }
  for (auto& x : state_->passes)
    result.passes.push_back(std::move(*x));
  state_->clear();
  return result;
}

void call_logger::take_back() {
  std::unique_lock guard{state_->mutex};
  state_->clear();
}

void call_logger::begin(const void* object,
                        std::span<const at::Tensor> arguments) {
  auto x = std::make_shared<open_call>();
  x->object = object;
  x->log.repeated = torch::autograd::get_current_node() != nullptr;
  // First: if a tensor cannot be read, e.g. has no data, nothing is logged.
  for (auto& t : arguments)
    x->log.arguments.push_back(digest_if_here(t));
  std::unique_lock guard{state_->mutex};
  auto position = static_cast<uint32_t>(state_->calls.size());
  x->log.microbatch = state_->current_microbatch();
  x->log.begun = state_->events++;
  x->log.number = state_->counts[{x->log.microbatch, object}]++;
  auto& stack = state_->running[std::this_thread::get_id()];
  if (!stack.empty())
    x->log.outer = stack.back();
  stack.push_back(position);
  for (auto& t : arguments) {
    x->arguments.push_back(t.unsafeGetTensorImpl());
    if (auto i = state_->origins.find(t.unsafeGetTensorImpl());
        i != state_->origins.end())
      for (auto call : i->second.calls)
        state_->calls[call]->log.used_by.push_back(position);
  }
  x->log.first_node = at::sequence_number::peek();
  state_->calls.push_back(std::move(x));
}

void call_logger::end(const void* object, std::span<const at::Tensor> results) {
  std::unique_lock guard{state_->mutex};
  auto& stack = state_->running[std::this_thread::get_id()];
  auto position = stack.empty() ? 0 : stack.back();
  auto x = state_->pop(object);
  if (!x)
    return;
  x->log.ended = state_->events++;
  x->ended = true;
  auto in_graph = at::GradMode::is_enabled();
  auto arguments = std::exchange(x->arguments, {});
  for (uint32_t i = 0; i < results.size(); ++i) {
    auto& t = results[i];
    at::NoGradGuard no_grad;
    x->log.results.push_back(digest_if_here(t));
    // A parameter, of this rank or another, would keep the hook forever. A
    // tensor only passed on has other users here than on its caller's rank.
    if (!in_graph || !t.requires_grad() || t.is_leaf() || is_placeholder(t)
        || std::find(arguments.begin(), arguments.end(),
                     t.unsafeGetTensorImpl())
             != arguments.end())
      continue;
    auto from = state_->origins.try_emplace(
      t.unsafeGetTensorImpl(),
      state::origin{
        {}, c10::weak_intrusive_ptr<c10::TensorImpl>{t.getIntrusivePtr()}});
    from.first->second.calls.push_back(position);
    auto node = t.grad_fn()->sequence_nr();
    t.register_hook([st = state_, x, i, node](const at::Tensor& gradient) {
      if (!gradient.defined())
        return;
      at::NoGradGuard no_grad;
      auto value = digest_of(gradient);
      std::unique_lock guard{st->mutex};
      x->log.gradients.push_back({i, st->gradients++, std::move(value), node});
    });
  }
  x->log.end_node = at::sequence_number::peek();
}

void call_logger::fail(const void* object) {
  std::unique_lock guard{state_->mutex};
  state_->pop(object);
}

void call_logger::body_done(std::span<const at::Tensor> inputs,
                            std::span<const at::Tensor> results) {
  auto pass = std::make_shared<logged_pass>();
  for (auto& t : inputs)
    if (t.defined())
      pass->inputs.push_back(digest_of(t));
  for (auto& t : results)
    pass->results.push_back(digest_of(t));
  std::unique_lock guard{state_->mutex};
  pass->microbatch = state_->current_microbatch();
  state_->passes.push_back(pass);
  for (auto& x : results)
    if (x.requires_grad() && !x.is_leaf())
      x.register_hook([st = state_, pass](const at::Tensor& gradient) {
        at::NoGradGuard no_grad;
        auto value = digest_of(gradient);
        std::unique_lock guard{st->mutex};
        pass->seeds.push_back(std::move(value));
      });
}

} // namespace smp
