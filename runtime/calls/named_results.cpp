#include "runtime/calls/named_results.hpp"

#include <string>

namespace smp {

failure named_results::refusal(object_id id) const {
  if (id.generation <= over_)
    return {error_code::protocol,
            id.owner,
            {},
            "a result of step " + std::to_string(id.generation)
              + " is asked for after the step"};
  if (why_ && id.generation == failed_)
    return why_;
  return {};
}

named_results::askers named_results::put(object_id id, microbatch_id m,
                                         at::Tensor x, tensor_ref bytes) {
  askers result;
  completion_ptr arrived;
  {
    std::lock_guard guard{mutex_};
    if (refusal(id))
      return {};
    auto& e = entries_[id];
    e.tensor = std::move(x);
    e.bytes = std::move(bytes);
    e.microbatch = m;
    arrived = std::move(e.arrived);
    for (auto rank : std::exchange(e.asked, {}))
      result.emplace_back(rank, id);
  }
  if (arrived)
    arrived->set();
  return result;
}

std::optional<named_results::answer> named_results::ask(rank_id by,
                                                        object_id id) {
  std::lock_guard guard{mutex_};
  if (auto i = entries_.find(id);
      i != entries_.end() && i->second.tensor.defined())
    return answer{i->second.tensor, i->second.bytes, {}};
  if (auto why = refusal(id))
    return answer{{}, {}, why};
  entries_[id].asked.push_back(by);
  return std::nullopt;
}

at::Tensor named_results::find(object_id id) const {
  std::lock_guard guard{mutex_};
  auto i = entries_.find(id);
  return i == entries_.end() ? at::Tensor{} : i->second.tensor;
}

completion_ptr named_results::arrival(object_id id) {
  failure why;
  {
    std::lock_guard guard{mutex_};
    auto i = entries_.find(id);
    if (i != entries_.end() && i->second.tensor.defined())
      return nullptr;
    why = refusal(id);
    if (!why) {
      auto& e = entries_[id];
      if (!e.arrived)
        e.arrived = std::make_shared<completion>();
      return e.arrived;
    }
  }
  auto result = std::make_shared<completion>();
  result->fail(std::move(why));
  return result;
}

void named_results::drop(object_id id) {
  // Destroying a tensor may destroy an autograd graph: not under the lock.
  entries::node_type gone;
  std::lock_guard guard{mutex_};
  if (auto i = entries_.find(id);
      i != entries_.end() && i->second.tensor.defined())
    gone = entries_.extract(i);
}

void named_results::drop(step_id s, microbatch_id m) {
  std::vector<entries::node_type> gone;
  std::lock_guard guard{mutex_};
  for (auto i = entries_.begin(); i != entries_.end();) {
    auto next = std::next(i);
    if (i->first.generation == generation_of(s) && i->second.tensor.defined()
        && i->second.microbatch == m)
      gone.push_back(entries_.extract(i));
    i = next;
  }
}

void named_results::give_up(entry& x, object_id id, const failure& why,
                            askers& result) {
  for (auto rank : std::exchange(x.asked, {}))
    result.emplace_back(rank, id);
  if (x.arrived)
    x.arrived->fail(why);
}

named_results::askers named_results::fail_step(step_id s, const failure& why) {
  askers result;
  entries waiting;
  {
    std::lock_guard guard{mutex_};
    failed_ = generation_of(s);
    why_ = why;
    for (auto i = entries_.begin(); i != entries_.end();) {
      auto next = std::next(i);
      if (i->first.generation == failed_ && !i->second.tensor.defined())
        waiting.insert(entries_.extract(i));
      i = next;
    }
  }
  for (auto& [id, x] : waiting)
    give_up(x, id, why, result);
  return result;
}

named_results::askers named_results::end_step(step_id s) {
  askers result;
  entries gone;
  failure why{error_code::cancelled, no_rank, {}, "the step is over"};
  {
    std::lock_guard guard{mutex_};
    over_ = generation_of(s);
    why_ = {};
    for (auto i = entries_.begin(); i != entries_.end();) {
      auto next = std::next(i);
      if (i->first.generation <= over_)
        gone.insert(entries_.extract(i));
      i = next;
    }
  }
  for (auto& [id, x] : gone)
    give_up(x, id, why, result);
  return result;
}

size_t named_results::size() const {
  std::lock_guard guard{mutex_};
  size_t result = 0;
  for (auto& [id, x] : entries_)
    result += x.tensor.defined();
  return result;
}

} // namespace smp
