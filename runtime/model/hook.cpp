#include "runtime/model/hook.hpp"

namespace smp {

namespace {

thread_local std::optional<uint32_t> innermost;
thread_local std::optional<bool> innermost_sharing;

} // namespace

partition_scope::partition_scope(uint32_t pp_rank) : previous_(innermost) {
  innermost = pp_rank;
}

partition_scope::~partition_scope() {
  innermost = previous_;
}

std::optional<uint32_t> partition_scope::current() noexcept {
  return innermost;
}

tensor_parallelism_scope::tensor_parallelism_scope(bool enabled)
  : previous_(innermost_sharing) {
  innermost_sharing = enabled;
}

tensor_parallelism_scope::~tensor_parallelism_scope() {
  innermost_sharing = previous_;
}

std::optional<bool> tensor_parallelism_scope::current() noexcept {
  return innermost_sharing;
}

} // namespace smp
