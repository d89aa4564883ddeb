#include "transport/collectives/direct.hpp"

#include <numeric>

namespace smp {

namespace {

using piece = collective_plan::piece;

/// What a rank gives to another one and takes from it, by that one's position.
class exchanged_parts {
public:
  exchanged_parts(const collective_call& x, uint64_t self)
    : x_(x), self_(self), part_(x.what.count() * size_of(x.what.type)) {
    // nop
  }

  /// Of the input.
  byte_range given(uint64_t to) const {
    using enum collective_kind;
    switch (x_.what.kind) {
      case reduce_scatter:
        return nth(to);
      case scatter:
        return self_ == x_.what.root ? nth(to) : byte_range{};
      case all_to_all:
        return x_.what.rows.empty() ? nth(to) : rows(x_.what.rows, to);
      default:
        return {0, part_};
    }
  }

  /// Of the output.
  byte_range taken(uint64_t from) const {
    using enum collective_kind;
    switch (x_.what.kind) {
      case allgather:
      case gather:
        return nth(from);
      case all_to_all:
        return x_.what.rows.empty() ? nth(from) : rows(x_.rows_taken, from);
      default:
        return {0, part_};
    }
  }

private:
  byte_range nth(uint64_t i) const {
    return {i * part_, part_};
  }

  byte_range rows(const std::vector<uint64_t>& xs, uint64_t i) const {
    auto before = std::accumulate(
      xs.begin(), xs.begin() + static_cast<ptrdiff_t>(i), uint64_t{0});
    return {before * part_, xs[i] * part_};
  }

  const collective_call& x_;
  uint64_t self_;
  uint64_t part_;
};

bool sums(collective_kind x) {
  using enum collective_kind;
  return x == allreduce || x == reduce || x == reduce_scatter;
}

bool gives(const collective_call& x, uint64_t from, uint64_t to) {
  using enum collective_kind;
  switch (x.what.kind) {
    case broadcast:
    case scatter:
      return from == x.what.root;
    case reduce:
    case gather:
      return to == x.what.root;
    default:
      return true;
  }
}

} // namespace

collective_plan direct_plan(const collective_call& x, uint64_t self) {
  collective_plan result;
  auto size = x.label.group.size();
  result.send_copies = x.what.kind == collective_kind::allreduce;
  exchanged_parts parts{x, self};
  // Each rank begins with the next one, so that not all send to the same.
  for (uint64_t i = 1; i < size; ++i)
    if (auto to = (self + i) % size; gives(x, self, to)) {
      auto id = sums(x.what.kind) ? 0 : static_cast<uint32_t>(self);
      result.sends.push_back({to, id, parts.given(to)});
    }
  piece sum;
  sum.range = parts.taken(self);
  sum.own = parts.given(self).begin;
  for (uint64_t from = 0; from < size; ++from) {
    if (!gives(x, from, self))
      continue;
    sum.sources.push_back(from);
    if (sums(x.what.kind))
      continue;
    piece y;
    y.id = static_cast<uint32_t>(from);
    y.range = parts.taken(from);
    y.sources = {from};
    y.own = parts.given(self).begin;
    result.pieces.push_back(std::move(y));
  }
  if (sums(x.what.kind) && !sum.sources.empty())
    result.pieces.push_back(std::move(sum));
  return result;
}

} // namespace smp
