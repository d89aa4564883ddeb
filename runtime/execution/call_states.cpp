#include "runtime/execution/call_states.hpp"

#include "runtime/base/rank_context.hpp"
#include "runtime/execution/running_call.hpp"
#include "runtime/execution/saved_calls.hpp"
#include "runtime/model/model_map.hpp"
#include "runtime/model/script_walk.hpp"
#include "runtime/values/tensor_bridge.hpp"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/equal.h>

#include <algorithm>
#include <iterator>

namespace smp {

namespace {

using pass = recompute_pass::kind;

/// Autograd must not see that content changes: it is changed back.
at::Tensor content_of(const model_map& map, uint32_t tensor) {
  return map.model().tensors[tensor].tensor.variable_data();
}

/// The call may change a list in place, which must not change the saved one.
c10::IValue copy_of(const c10::IValue& x) {
  return x.isTensor() || x.isObject() ? x : x.deepcopy();
}

module_state copy_of(const module_state& x) {
  module_state result;
  for (auto& [t, content] : x.tensors)
    result.tensors.emplace_back(t, content.clone());
  for (auto& [slot, content] : x.attributes)
    result.attributes.emplace_back(slot, copy_of(content));
  return result;
}

module_state keep(running_call& ex, map_changes& changes, module_id module) {
  auto& map = changes.map();
  auto i = static_cast<uint32_t>(module.value);
  auto& entry = map.order().entries().at(i);
  module_state result;
  for (auto t : entry.state)
    if (map.owned(t) && changes.may_change(t, ex.rank().step())
        && refusal_of(map.model().tensors[t].tensor).empty())
      result.tensors.emplace_back(t, content_of(map, t).clone());
  auto* script = map.model().modules[i].script;
  if (script == nullptr || entry.reasons.empty())
    return result;
  for (size_t slot = 0; slot < script->slots().size(); ++slot)
    if (auto& x = script->getSlot(slot); !x.isObject())
      result.attributes.emplace_back(slot, copy_of(x));
  return result;
}

/// Keeps only what changed, or what a call of another module may change before
/// the recomputation.
void drop_unchanged(map_changes& changes, module_state& x) {
  std::erase_if(x.tensors, [&](auto& y) {
    auto now = content_of(changes.map(), y.first);
    auto changed = now.sizes() != y.second.sizes()
                   || now.scalar_type() != y.second.scalar_type()
                   || !at::equal(now, y.second);
    changes.note_change(y.first, changed);
    return !changed && changes.map().order().guards(y.first).size() == 1;
  });
}

void put_attribute(map_changes& changes, c10::ivalue::Object& self, size_t slot,
                   c10::IValue x) {
  auto& old = self.getSlot(slot);
  if (old.isTensor() && x.isTensor())
    changes.rebind(old.toTensor(), x.toTensor());
  self.setSlot(slot, std::move(x));
}

} // namespace

void call_states::enter(running_call& ex, map_changes& changes,
                        module_id module) {
  auto what = ex.pass().what;
  if (what == pass::only
      || !changes.map().order().ordered(static_cast<uint32_t>(module.value)))
    return;
  at::NoGradGuard no_grad;
  running x;
  x.module = module;
  x.path = ex.streams().here().path;
  x.changes = &changes;
  x.again = what == pass::again;
  if (!x.again)
    x.state = keep(ex, changes, module);
  else if (auto kept = ex.rank().calls().state(ex.step(), ex.microbatch(),
                                               x.path, module))
    x.state = copy_of(*kept); // may be recomputed again
  else                        // first pass changed nothing
    x.state = keep(ex, changes, module);
  if (x.again)
    recall(x);
  calls_.push_back(std::move(x));
}

void call_states::leave(running_call& ex, map_changes& changes,
                        module_id module) {
  auto i = std::find_if(calls_.rbegin(), calls_.rend(),
                        [](auto& x) { return !x.over; });
  if (i == calls_.rend() || i->module != module
      || i->path != ex.streams().here().path)
    return;
  if (i->again) {
    i->over = true;
    return;
  }
  at::NoGradGuard no_grad;
  auto x = std::move(*i);
  calls_.erase(std::next(i).base());
  drop_unchanged(changes, x.state);
  if (!x.state.empty())
    ex.rank().calls().put_state(ex.step(), ex.microbatch(), x.path, module,
                                std::move(x.state));
}

namespace {

void exchange_attributes(map_changes& changes, c10::ivalue::Object* self,
                         module_state& x) {
  for (auto& [slot, other] : x.attributes) {
    auto now = self->getSlot(slot);
    put_attribute(changes, *self, slot, std::exchange(other, now));
  }
}

void exchange_contents(const std::vector<at::Tensor>& tensors,
                       module_state& x) {
  for (size_t i = 0; i < tensors.size(); ++i) {
    auto& other = x.tensors[i].second;
    auto now = tensors[i].clone();
    tensors[i].copy_(other);
    other = std::move(now);
  }
}

} // namespace

void call_states::recall(running& x) {
  auto& map = x.changes->map();
  exchange_attributes(*x.changes, map.model().modules[x.module.value].script,
                      x.state);
  // The code may replace the tensor of a buffer.
  if (x.tensors.empty())
    for (auto& [t, content] : x.state.tensors)
      x.tensors.push_back(content_of(map, t));
  exchange_contents(x.tensors, x.state);
}

void call_states::put_back(running& x) {
  exchange_contents(x.tensors, x.state);
  auto& map = x.changes->map();
  exchange_attributes(*x.changes, map.model().modules[x.module.value].script,
                      x.state);
}

call_states::recalled::~recalled() {
  at::NoGradGuard no_grad;
  auto& calls = states_.calls_;
  while (calls.size() > begin_) {
    if (calls.back().again)
      put_back(calls.back());
    calls.pop_back();
  }
}

void call_states::suspend() {
  at::NoGradGuard no_grad;
  for (auto i = calls_.rbegin(); i != calls_.rend(); ++i)
    if (i->again)
      put_back(*i);
}

void call_states::resume() {
  at::NoGradGuard no_grad;
  for (auto& x : calls_)
    if (x.again)
      recall(x);
}

} // namespace smp
