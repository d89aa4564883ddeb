#include "runtime/execution/call_states.hpp"

#include "runtime/base/rank_context.hpp"
#include "runtime/execution/running_call.hpp"
#include "runtime/execution/saved_calls.hpp"
#include "runtime/model/model_map.hpp"
#include "runtime/model/module_facts.hpp"
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

module_state copy_of(const module_state& x) {
  module_state result{{}, x.attributes};
  for (auto& [t, content] : x.tensors)
    result.tensors.emplace_back(t, content.clone());
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
  auto keep_attributes = [&](uint32_t m) {
    if (map.owner(module_id{m}) == map.self())
      if (auto x = map.model().modules[m].facts->keep_attributes())
        result.attributes.emplace_back(m, std::move(x));
  };
  if (entry.reasons.empty())
    keep_attributes(i);
  else
    for (auto m : map.model().subtree(i))
      keep_attributes(m);
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
    exchange(x);
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

void call_states::exchange(running& x) {
  auto& map = x.changes->map();
  module_state now;
  for (auto& [t, content] : x.state.tensors)
    now.tensors.emplace_back(t, content_of(map, t).clone());
  // Code may have put other tensors into the slots of buffers.
  for (auto& [m, kept] : x.state.attributes) {
    now.attributes.emplace_back(
      m, map.model().modules[m].facts->keep_attributes());
    kept->put_back(x.changes);
  }
  for (auto& [t, content] : x.state.tensors)
    content_of(map, t).copy_(content);
  x.state = std::move(now);
}

call_states::recalled::~recalled() {
  at::NoGradGuard no_grad;
  auto& calls = states_.calls_;
  while (calls.size() > begin_) {
    if (calls.back().again)
      exchange(calls.back());
    calls.pop_back();
  }
}

void call_states::suspend() {
  at::NoGradGuard no_grad;
  for (auto i = calls_.rbegin(); i != calls_.rend(); ++i)
    if (i->again)
      exchange(*i);
}

void call_states::resume() {
  at::NoGradGuard no_grad;
  for (auto& x : calls_)
    if (x.again)
      exchange(x);
}

} // namespace smp
