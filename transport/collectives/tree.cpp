#include "transport/collectives/tree.hpp"

#include <algorithm>

namespace smp {

namespace {

/// The neighbours of a rank in the tree, as positions.
struct place {
  uint64_t parent = 0;
  std::vector<uint64_t> children;
};

/// Counted from the root, a rank's parent is its number less its lowest bit.
place place_of(uint64_t self, uint64_t root, uint64_t size) {
  auto number = (self + size - root) % size;
  auto position = [&](uint64_t x) { return (x + root) % size; };
  place result;
  result.parent = position(number & (number - 1));
  auto lowest = number == 0 ? size : number & (~number + 1);
  for (uint64_t bit = 1; bit < lowest && number + bit < size; bit *= 2)
    result.children.push_back(position(number + bit));
  // The child with the deepest subtree first.
  std::reverse(result.children.begin(), result.children.end());
  return result;
}

constexpr uint32_t up = 0;
constexpr uint32_t down = 1;

} // namespace

collective_plan tree_plan(const collective_call& x, uint64_t self) {
  using enum collective_kind;
  auto kind = x.what.kind;
  auto root = x.what.root;
  auto [parent, children] = place_of(self, root, x.label.group.size());
  byte_range all{0, x.what.count() * size_of(x.what.type)};
  collective_plan result;
  if (kind != broadcast) {
    collective_plan::piece sum;
    sum.id = up;
    sum.range = all;
    sum.sources = {self};
    sum.sources.insert(sum.sources.end(), children.begin(), children.end());
    sum.last_sum = self == root;
    if (self != root) {
      sum.apart = true;
      sum.forward = {parent};
      sum.forward_as = up;
    } else if (kind != reduce) {
      sum.forward = children;
      sum.forward_as = down;
    }
    result.pieces.push_back(std::move(sum));
  }
  if (kind == reduce || (self == root && kind != broadcast))
    return result;
  collective_plan::piece copy;
  copy.id = down;
  copy.range = all;
  copy.sources = {self == root ? self : parent};
  copy.forward = children;
  copy.forward_as = down;
  result.pieces.push_back(std::move(copy));
  return result;
}

} // namespace smp
