#include "runtime/execution/saved_calls.hpp"

#include <torch/csrc/autograd/function.h>

namespace smp {

void saved_calls::put(step_id s, microbatch_id m, request_id call,
                      std::shared_ptr<saved_call> x) {
  std::unique_lock guard{mutex_};
  calls_[{s, m}].emplace(call, std::move(x));
}

std::shared_ptr<saved_call> saved_calls::take(step_id s, microbatch_id m,
                                              request_id call, bool keep) {
  std::unique_lock guard{mutex_};
  auto i = calls_.find({s, m});
  if (i == calls_.end())
    return nullptr;
  auto j = i->second.find(call);
  if (j == i->second.end())
    return nullptr;
  auto result = j->second;
  if (!keep)
    i->second.erase(j);
  return result;
}

void saved_calls::put_state(step_id s, microbatch_id m, uint64_t path,
                            module_id module, module_state x) {
  auto kept = std::make_shared<const module_state>(std::move(x));
  std::unique_lock guard{mutex_};
  states_[{s, m}].emplace(std::pair{path, module}, std::move(kept));
}

std::shared_ptr<const module_state> saved_calls::state(step_id s,
                                                       microbatch_id m,
                                                       uint64_t path,
                                                       module_id module) const {
  std::unique_lock guard{mutex_};
  auto i = states_.find({s, m});
  if (i == states_.end())
    return nullptr;
  auto j = i->second.find({path, module});
  return j == i->second.end() ? nullptr : j->second;
}

void saved_calls::drop(step_id s, microbatch_id m) {
  // Destroying a graph may take long and run user code: not under the lock.
  decltype(calls_)::node_type dropped;
  decltype(states_)::node_type states;
  std::unique_lock guard{mutex_};
  dropped = calls_.extract({s, m});
  states = states_.extract({s, m});
  guard.unlock();
}

void saved_calls::clear() {
  decltype(calls_) dropped;
  decltype(states_) states;
  std::unique_lock guard{mutex_};
  dropped.swap(calls_);
  states.swap(states_);
  guard.unlock();
}

size_t saved_calls::size() const {
  std::unique_lock guard{mutex_};
  size_t result = 0;
  for (auto& [key, calls] : calls_)
    result += calls.size();
  return result;
}

} // namespace smp
