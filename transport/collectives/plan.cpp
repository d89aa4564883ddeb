#include "transport/collectives/plan.hpp"

#include "transport/collectives/direct.hpp"
#include "transport/collectives/parts.hpp"
#include "transport/collectives/tree.hpp"

#include <algorithm>

namespace smp {

namespace {

/// Whether `shape` is that of a part of the whole.
bool has_parts(collective_kind x) {
  using enum collective_kind;
  return x != allreduce && x != reduce && x != broadcast;
}

collective_plan choose(const collective_call& x, uint64_t self, uint64_t bytes,
                       const collective_limits& limits) {
  using enum collective_kind;
  auto size = x.label.group.size();
  auto kind = x.what.kind;
  auto is_large = bytes > limits.direct / std::max<uint64_t>(size - 1, 1);
  switch (kind) {
    case allreduce:
    case reduce:
    case broadcast:
      // Between two, the root of a broadcast has no one to share with.
      if (is_large && size > (kind == broadcast ? 2 : 1))
        return parts_plan(x, self);
      [[fallthrough]];
    case barrier:
      if (size > limits.direct_ranks)
        return tree_plan(x, self);
      break;
    default:
      break;
  }
  return direct_plan(x, self);
}

} // namespace

collective_plan make_plan(const collective_call& x, uint64_t self,
                          const collective_limits& limits) {
  auto bytes = x.what.count() * size_of(x.what.type);
  auto result = choose(x, self, bytes, limits);
  // A few segments of each part, so that what is summed, what is received and
  // what is sent are different ones. Of rows, only their owners know how many
  // there are.
  auto part = has_parts(x.what.kind) ? bytes : bytes / x.label.group.size();
  auto wanted = x.what.rows.empty() ? part / 4 : limits.largest_segment;
  wanted = std::clamp(wanted, limits.least_segment, limits.largest_segment);
  result.segment = (wanted + piece_alignment - 1) / piece_alignment
                   * piece_alignment;
  return result;
}

} // namespace smp
