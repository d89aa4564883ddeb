#include "runtime/execution/running_call.hpp"

#include "runtime/base/here.hpp"
#include "runtime/base/rank_context.hpp"

namespace smp {

running_call* running_call::current() noexcept {
  return smp::here::of_thread().call;
}

void running_call::set_current(running_call* x) noexcept {
  smp::here::of_thread().call = x;
}

void running_call::begin(const request& x, uint64_t seed) {
  step_ = x.step;
  microbatch_ = x.microbatch;
  id_ = x.id;
  start_number_ = x.start_number;
  is_root_ = x.module == root_module && x.id.origin == rank_.self();
  requests_ = 0;
  streams_.begin(seed);
  pass_ = {};
  region_ = 0;
  entered_.clear();
  in_backward_ = false;
  granted_ = false;
  met_state_ = false;
  first_error_ = {};
  module_path_.clear();
  lent_.clear();
  range_ = {};
}

void running_call::end() {
  streams_.end();
  states_.end();
  entered_.clear();
  outstanding_.clear();
  promises_.clear();
}

std::vector<at::Tensor> running_call::take_promises() {
  std::vector<at::Tensor> result;
  for (auto& x : std::exchange(promises_, {}))
    if (auto impl = x.lock())
      result.emplace_back(std::move(impl));
  return result;
}

void running_call::keep_error(failure x) {
  if (!first_error_)
    first_error_ = std::move(x);
}

failure running_call::here(failure x) const {
  if (x.rank == no_rank)
    x.rank = rank_.self();
  if (x.module.empty())
    x.module = module_path_;
  return x;
}

} // namespace smp
