#include "transport/collectives/plan.hpp"

#include "transport/collectives/direct.hpp"
#include "transport/collectives/machines.hpp"
#include "transport/collectives/parts.hpp"
#include "transport/collectives/tree.hpp"

#include <algorithm>

namespace smp {

namespace {

/// Whether `shape` is the shape of a part of the whole.
bool has_parts(collective_kind x) {
  using enum collective_kind;
  return x != allreduce && x != reduce && x != broadcast;
}

collective_plan choose(const collective_call& x, uint64_t self, uint64_t bytes,
                       const collective_limits& limits,
                       const group_places& where) {
  using enum collective_kind;
  auto size = x.label.group.size();
  auto kind = x.what.kind;
  auto is_large = bytes > limits.direct / std::max<uint64_t>(size - 1, 1);
  // Small data arrives sooner without a rank in between.
  auto by_machine = is_large && where.mixed();
  switch (kind) {
    case allreduce:
    case reduce:
    case broadcast:
      if (by_machine)
        return machines_plan(x, self, where);
      if (is_large && x.what.every_root)
        return direct_plan(x, self);
      // Of two ranks, a root has no other one to share the work with.
      if (is_large && size > (kind == allreduce ? 1 : 2))
        return parts_plan(x, self);
      [[fallthrough]];
    case barrier:
      if (size > limits.direct_ranks)
        return tree_plan(x, self);
      break;
    case reduce_scatter:
    case allgather:
      if (by_machine)
        return machines_plan(x, self, where);
      break;
    default:
      break;
  }
  return direct_plan(x, self);
}

} // namespace

group_places places_of(const std::vector<rank_id>& group,
                       const std::vector<uint64_t>& machine_of_rank) {
  group_places result;
  std::vector<uint64_t> known; // machines as the caller counts them
  for (uint64_t i = 0; i < group.size(); ++i) {
    auto rank = group[i].value;
    auto machine = machine_of_rank.empty() ? 0 : machine_of_rank.at(rank);
    auto at = std::find(known.begin(), known.end(), machine) - known.begin();
    auto number = static_cast<uint64_t>(at);
    if (number == known.size()) {
      known.push_back(machine);
      result.members.emplace_back();
    }
    result.of.push_back(number);
    result.members[number].push_back(i);
  }
  return result;
}

collective_plan make_plan(const collective_call& x, uint64_t self,
                          const collective_limits& limits,
                          const group_places& where) {
  auto bytes = x.what.count() * size_of(x.what.type);
  auto result = choose(x, self, bytes, limits, where);
  // A few segments per part, so that summing, receiving and sending work on
  // different ones. Only their owners know the number of rows, so those take
  // the largest size.
  auto part = has_parts(x.what.kind) ? bytes : bytes / x.label.group.size();
  auto there = x.what.on_device;
  auto least = there ? limits.least_device_segment : limits.least_segment;
  auto largest = there ? limits.largest_device_segment : limits.largest_segment;
  auto wanted = x.what.rows.empty() ? part / 4 : largest;
  wanted = std::clamp(wanted, least, largest);
  result.segment = (wanted + piece_alignment - 1) / piece_alignment
                   * piece_alignment;
  return result;
}

} // namespace smp
