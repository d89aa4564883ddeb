#include "runtime/model/hook.hpp"

#include "transport/error.hpp"

namespace smp {

namespace {

/// What the innermost scopes of this thread set.
struct innermost_scopes {
  std::optional<uint32_t> pp_rank;
  std::optional<sharing_mark> sharing;
};

thread_local innermost_scopes innermost;

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

partition_scope::partition_scope(uint32_t pp_rank)
  : previous_(innermost.pp_rank) {
  innermost.pp_rank = pp_rank;
}

partition_scope::~partition_scope() {
  innermost.pp_rank = previous_;
}

std::optional<uint32_t> partition_scope::current() noexcept {
  return innermost.pp_rank;
}

tensor_parallelism_scope::tensor_parallelism_scope(
  bool enabled, const tensor_parallel_config& x)
  : previous_(innermost.sharing) {
  auto mark = make_sharing_mark(enabled, x);
  if (!mark.saves_memory && previous_)
    mark.saves_memory = previous_->saves_memory;
  innermost.sharing = mark;
}

tensor_parallelism_scope::~tensor_parallelism_scope() {
  innermost.sharing = previous_;
}

std::optional<sharing_mark> tensor_parallelism_scope::current() noexcept {
  return innermost.sharing;
}

} // namespace smp
