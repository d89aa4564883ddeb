#include "runtime/collectives/current_rank.hpp"

#include "runtime/base/rank_context.hpp"

namespace smp {

const rank_context& current_rank() {
  if (auto* x = rank_context::current())
    return *x;
  throw no_session();
}

error no_session() {
  return {error_code::unsupported,
          "no smp::session on this thread: make one first, and call smp from "
          "the thread that made it"};
}

} // namespace smp
