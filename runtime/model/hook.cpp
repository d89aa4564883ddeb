#include "runtime/model/hook.hpp"

namespace smp {

namespace {

thread_local std::optional<uint32_t> innermost;

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

} // namespace smp
