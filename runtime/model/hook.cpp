#include "runtime/model/hook.hpp"

#include "transport/error.hpp"

namespace smp {

namespace {

thread_local std::optional<uint32_t> innermost;
thread_local std::optional<sharing_mark> innermost_sharing;

} // namespace

sharing_mark make_sharing_mark(bool enabled, const tensor_parallel_config& x) {
  if (x.optimize.empty())
    return {enabled};
  if (x.optimize != "memory" && x.optimize != "speed")
    throw config_error("tensor parallelism: optimize is \"" + x.optimize
                       + "\"; write \"memory\" or \"speed\"");
  if (!enabled)
    throw config_error(
      "tensor parallelism: optimize has no effect on modules "
      "that are not to be shared");
  return {true, x.optimize == "memory"};
}

partition_scope::partition_scope(uint32_t pp_rank) : previous_(innermost) {
  innermost = pp_rank;
}

partition_scope::~partition_scope() {
  innermost = previous_;
}

std::optional<uint32_t> partition_scope::current() noexcept {
  return innermost;
}

tensor_parallelism_scope::tensor_parallelism_scope(
  bool enabled, const tensor_parallel_config& x)
  : previous_(innermost_sharing) {
  auto mark = make_sharing_mark(enabled, x);
  if (!mark.saves_memory && previous_)
    mark.saves_memory = previous_->saves_memory;
  innermost_sharing = mark;
}

tensor_parallelism_scope::~tensor_parallelism_scope() {
  innermost_sharing = previous_;
}

std::optional<sharing_mark> tensor_parallelism_scope::current() noexcept {
  return innermost_sharing;
}

} // namespace smp
