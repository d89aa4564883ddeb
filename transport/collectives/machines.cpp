#include "transport/collectives/machines.hpp"

#include "transport/collectives/parts.hpp"

#include <algorithm>

namespace smp {

namespace {

using piece = collective_plan::piece;

/// A part of the group's data, and the rank that makes it.
struct owned_part {
  uint64_t owner = 0; // position
  byte_range input;
  byte_range output;
};

/// The common part of all of these plans: which rank speaks for a machine.
class machines_planner {
public:
  machines_planner(const collective_call& x, uint64_t self,
                   const group_places& where)
    : x_(x), self_(self), where_(where) {
    // nop
  }

  collective_plan sums() const;
  collective_plan broadcast() const;
  collective_plan allgather() const;

private:
  bool is_here(uint64_t position) const {
    return where_.of[position] == where_.of[self_];
  }

  const std::vector<uint64_t>& here() const {
    return where_.members[where_.of[self_]];
  }

  /// @returns the rank on `machine` that handles the part of `owner`.
  uint64_t speaker(uint64_t machine, uint64_t owner) const {
    if (where_.of[owner] == machine)
      return owner;
    auto& own = where_.members[where_.of[owner]];
    auto nth = std::find(own.begin(), own.end(), owner) - own.begin();
    auto& there = where_.members[machine];
    return there[static_cast<size_t>(nth) % there.size()];
  }

  bool speaks_for(uint64_t owner) const {
    return speaker(where_.of[self_], owner) == self_;
  }

  /// The ranks on this machine, without this one and `except`.
  std::vector<uint64_t> others_here(uint64_t except) const {
    std::vector<uint64_t> result;
    for (auto i : here())
      if (i != self_ && i != except)
        result.push_back(i);
    return result;
  }

  /// The ranks that get what this rank has made or begins with: those on this
  /// machine, and its speakers on the others, without machine `except`.
  std::vector<uint64_t> audience(uint64_t except) const {
    auto result = others_here(self_);
    for (uint64_t m = 0; m < where_.members.size(); ++m)
      if (m != where_.of[self_] && m != except)
        result.push_back(speaker(m, self_));
    return result;
  }

  /// The data that `owner` has made, on its way to all ranks.
  piece copy_of(uint64_t owner, uint32_t id, byte_range range) const;

  std::vector<owned_part> parts_of_sum() const;
  void add_part(collective_plan& result, const std::vector<owned_part>& parts,
                size_t index) const;
  piece sum_of(const owned_part& part, uint32_t id, uint32_t copy) const;

  uint64_t bytes() const {
    return x_.what.count() * size_of(x_.what.type);
  }

  static constexpr uint64_t nobody = ~uint64_t{0};

  const collective_call& x_;
  const uint64_t self_;
  const group_places& where_;
};

piece machines_planner::copy_of(uint64_t owner, uint32_t id,
                                byte_range range) const {
  piece result;
  result.id = id;
  result.range = range;
  auto from_owner = is_here(owner) || speaks_for(owner);
  result.sources = {from_owner ? owner : speaker(where_.of[self_], owner)};
  result.forward_as = id;
  if (!is_here(owner) && speaks_for(owner))
    result.forward = others_here(self_);
  return result;
}

// -- sums ---------------------------------------------------------------------

std::vector<owned_part> machines_planner::parts_of_sum() const {
  std::vector<owned_part> result;
  auto size = where_.of.size();
  if (x_.what.kind == collective_kind::reduce_scatter) {
    for (uint64_t i = 0; i < size; ++i)
      result.push_back({i, {i * bytes(), bytes()}, {0, bytes()}});
    return result;
  }
  // A sum for only one rank is made on that rank's machine.
  std::vector<uint64_t> owners;
  for (uint64_t i = 0; i < size; ++i)
    if (x_.what.kind == collective_kind::allreduce
        || where_.of[i] == where_.of[x_.what.root])
      owners.push_back(i);
  for (uint64_t i = 0; i < owners.size(); ++i) {
    auto range = part_of(bytes(), owners.size(), i);
    result.push_back({owners[i], range, range});
  }
  return result;
}

/// @param copy id of the result on the ranks that get it
piece machines_planner::sum_of(const owned_part& part, uint32_t id,
                               uint32_t copy) const {
  piece result;
  result.id = id;
  result.range = part.output;
  result.own = part.input.begin;
  for (uint64_t m = 0; m < where_.members.size(); ++m) {
    if (m == where_.of[self_])
      result.sources.insert(result.sources.end(), here().begin(), here().end());
    else
      result.sources.push_back(speaker(m, self_));
  }
  result.forward_as = copy;
  if (x_.what.kind == collective_kind::allreduce)
    result.forward = audience(nobody);
  if (x_.what.kind == collective_kind::reduce && self_ != x_.what.root) {
    result.forward = {x_.what.root};
    result.apart = true;
  }
  return result;
}

void machines_planner::add_part(collective_plan& result,
                                const std::vector<owned_part>& parts,
                                size_t index) const {
  auto& part = parts[index];
  // Ids of a part: the sum of all, that of one machine, and the result.
  auto whole = static_cast<uint32_t>(index);
  auto local = static_cast<uint32_t>(parts.size() + index);
  auto copy = static_cast<uint32_t>(2 * parts.size() + index);
  auto speaks = speaker(where_.of[self_], part.owner);
  if (speaks != self_) {
    auto to_owner = speaks == part.owner;
    result.sends.push_back({speaks, to_owner ? whole : local, part.input});
  } else if (self_ == part.owner) {
    result.pieces.push_back(sum_of(part, whole, copy));
  } else if (here().size() == 1) {
    result.sends.push_back({part.owner, whole, part.input});
  } else {
    piece sum;
    sum.id = local;
    sum.range = part.input;
    sum.apart = true;
    sum.sources = here();
    sum.own = part.input.begin;
    sum.last_sum = false;
    sum.forward = {part.owner};
    sum.forward_as = whole;
    result.pieces.push_back(std::move(sum));
  }
  if (self_ == part.owner || x_.what.kind == collective_kind::reduce_scatter)
    return;
  if (x_.what.kind == collective_kind::allreduce) {
    result.pieces.push_back(copy_of(part.owner, copy, part.output));
  } else if (self_ == x_.what.root) {
    piece taken;
    taken.id = copy;
    taken.range = part.output;
    taken.sources = {part.owner};
    result.pieces.push_back(std::move(taken));
  }
}

collective_plan machines_planner::sums() const {
  collective_plan result;
  auto parts = parts_of_sum();
  // Ranks begin with different parts.
  for (size_t i = 0; i < parts.size(); ++i)
    add_part(result, parts, (self_ + 1 + i) % parts.size());
  return result;
}

// -- moves --------------------------------------------------------------------

/// The root's machine, and all others together, each split what the root sends.
collective_plan machines_planner::broadcast() const {
  collective_plan result;
  auto root = x_.what.root;
  std::vector<uint64_t> near;
  std::vector<uint64_t> far;
  for (uint64_t i = 0; i < where_.of.size(); ++i)
    if (i != root)
      (where_.of[i] == where_.of[root] ? near : far).push_back(i);
  for (auto* side : {&near, &far})
    for (uint64_t i = 0; i < side->size(); ++i) {
      auto via = (*side)[i];
      auto range = part_of(bytes(), side->size(), i);
      auto id = static_cast<uint32_t>(via);
      if (self_ == root) {
        result.sends.push_back({via, id, range});
      } else if ((side == &near) == is_here(root)) {
        auto y = copy_of(via, id, range);
        if (via == self_) {
          y.sources = {root};
          y.forward = side == &near ? others_here(root)
                                    : audience(where_.of[root]);
        }
        result.pieces.push_back(std::move(y));
      }
    }
  if (self_ == root) {
    piece own;
    own.id = static_cast<uint32_t>(root);
    own.range = {0, bytes()};
    own.sources = {root};
    result.pieces.push_back(std::move(own));
  }
  return result;
}

collective_plan machines_planner::allgather() const {
  collective_plan result;
  auto size = where_.of.size();
  auto id = static_cast<uint32_t>(self_);
  for (auto to : audience(nobody))
    result.sends.push_back({to, id, {0, bytes()}});
  for (uint64_t from = 0; from < size; ++from)
    result.pieces.push_back(
      copy_of(from, static_cast<uint32_t>(from), {from * bytes(), bytes()}));
  return result;
}

} // namespace

collective_plan machines_plan(const collective_call& x, uint64_t self,
                              const group_places& where) {
  machines_planner planner{x, self, where};
  switch (x.what.kind) {
    case collective_kind::broadcast:
      return planner.broadcast();
    case collective_kind::allgather:
      return planner.allgather();
    default:
      return planner.sums();
  }
}

} // namespace smp
