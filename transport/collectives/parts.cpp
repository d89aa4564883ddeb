#include "transport/collectives/parts.hpp"

#include <algorithm>
#include <numeric>

namespace smp {

byte_range part_of(uint64_t bytes, uint64_t parts, uint64_t index) {
  auto blocks = (bytes + piece_alignment * parts - 1)
                / (piece_alignment * parts);
  auto size = blocks * piece_alignment;
  auto begin = std::min(bytes, index * size);
  return {begin, std::min(size, bytes - begin)};
}

namespace {

std::vector<uint64_t> all_but(uint64_t size, uint64_t self, uint64_t other) {
  std::vector<uint64_t> result;
  // As in `direct_plan`.
  for (uint64_t i = 1; i < size; ++i)
    if (auto to = (self + i) % size; to != other)
      result.push_back(to);
  return result;
}

void plan_sum(collective_plan& result, const collective_call& x,
              uint64_t self) {
  auto size = x.label.group.size();
  auto bytes = x.what.count() * size_of(x.what.type);
  auto root = x.what.root;
  auto everybody = x.what.kind == collective_kind::allreduce;
  for (auto to : all_but(size, self, size))
    result.sends.push_back(
      {to, static_cast<uint32_t>(to), part_of(bytes, size, to)});
  collective_plan::piece own;
  own.id = static_cast<uint32_t>(self);
  own.range = part_of(bytes, size, self);
  own.own = own.range.begin;
  own.sources.resize(size);
  std::iota(own.sources.begin(), own.sources.end(), uint64_t{0});
  own.forward_as = static_cast<uint32_t>(size + self);
  if (everybody)
    own.forward = all_but(size, self, size);
  else if (self != root)
    own.forward = {root};
  own.apart = !everybody && self != root;
  result.pieces.push_back(std::move(own));
  if (!everybody && self != root)
    return;
  for (uint64_t from = 0; from < size; ++from) {
    if (from == self)
      continue;
    collective_plan::piece y;
    y.id = static_cast<uint32_t>(size + from);
    y.range = part_of(bytes, size, from);
    y.sources = {from};
    result.pieces.push_back(std::move(y));
  }
}

/// Parts are counted without the root.
uint64_t helper(uint64_t position, uint64_t root) {
  return position < root ? position : position - 1;
}

void plan_broadcast(collective_plan& result, const collective_call& x,
                    uint64_t self) {
  auto size = x.label.group.size();
  auto bytes = x.what.count() * size_of(x.what.type);
  auto root = x.what.root;
  auto part = [&](uint64_t position) {
    return part_of(bytes, size - 1, helper(position, root));
  };
  if (self == root) {
    for (auto to : all_but(size, self, size))
      result.sends.push_back({to, static_cast<uint32_t>(to), part(to)});
    collective_plan::piece own;
    own.id = static_cast<uint32_t>(root);
    own.range = {0, bytes};
    own.sources = {root};
    result.pieces.push_back(std::move(own));
    return;
  }
  for (uint64_t via = 0; via < size; ++via) {
    if (via == root)
      continue;
    collective_plan::piece y;
    y.id = static_cast<uint32_t>(via);
    y.range = part(via);
    y.sources = {via == self ? root : via};
    if (via == self) {
      y.forward = all_but(size, self, root);
      y.forward_as = y.id;
    }
    result.pieces.push_back(std::move(y));
  }
}

} // namespace

collective_plan parts_plan(const collective_call& x, uint64_t self) {
  collective_plan result;
  if (x.what.kind == collective_kind::broadcast)
    plan_broadcast(result, x, self);
  else
    plan_sum(result, x, self);
  return result;
}

} // namespace smp
