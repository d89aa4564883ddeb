#include "runtime/remote/saved_calls.hpp"

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

void saved_calls::drop(step_id s, microbatch_id m) {
  // Destroying a graph may take long and run user code: not under the lock.
  decltype(calls_)::node_type dropped;
  std::unique_lock guard{mutex_};
  dropped = calls_.extract({s, m});
  guard.unlock();
}

void saved_calls::clear() {
  decltype(calls_) dropped;
  std::unique_lock guard{mutex_};
  dropped.swap(calls_);
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
