#include "runtime/remote/execution.hpp"

#include "runtime/base/rank_context.hpp"

namespace smp {

namespace {

thread_local execution* current_execution = nullptr;

} // namespace

execution* execution::current() noexcept {
  return current_execution;
}

void execution::set_current(execution* x) noexcept {
  current_execution = x;
}

void execution::begin(const request& x, uint64_t seed) {
  step_ = x.step;
  microbatch_ = x.microbatch;
  id_ = x.id;
  turn_ = x.turn;
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

void execution::end() {
  streams_.end();
  states_.end();
  entered_.clear();
  outstanding_.clear();
  promises_.clear();
}

std::vector<at::Tensor> execution::take_promises() {
  std::vector<at::Tensor> result;
  for (auto& x : std::exchange(promises_, {}))
    if (auto impl = x.lock())
      result.emplace_back(std::move(impl));
  return result;
}

void execution::keep_error(failure x) {
  if (!first_error_)
    first_error_ = std::move(x);
}

failure execution::here(failure x) const {
  if (x.rank == no_rank)
    x.rank = rank_.self();
  if (x.module.empty())
    x.module = module_path_;
  return x;
}

} // namespace smp
