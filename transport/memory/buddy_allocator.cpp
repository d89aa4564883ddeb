#include "transport/memory/buddy_allocator.hpp"

#include "transport/error.hpp"

#include <bit>
#include <string>

namespace smp {

buddy_allocator::buddy_allocator(uint64_t capacity, uint64_t smallest)
  : smallest_(smallest) {
  if (!std::has_single_bit(smallest))
    throw error{error_code::internal,
                std::to_string(smallest) + " bytes are not a power of two"};
  capacity_ = capacity / smallest * smallest;
  // A capacity that is not a power of two begins as several parts, the largest
  // first: so each lies at a multiple of its size, and no two are buddies.
  free_.resize(static_cast<size_t>(std::bit_width(capacity / smallest)));
  uint64_t offset = 0;
  for (auto order = free_.size(); order-- > 0;) {
    auto size = size_of(static_cast<unsigned>(order));
    if (capacity_ - offset < size)
      continue;
    free_[order].insert(offset);
    offset += size;
  }
}

std::optional<uint64_t> buddy_allocator::allocate(uint64_t size) {
  if (size > capacity_)
    return std::nullopt;
  auto units = (size + smallest_ - 1) / smallest_;
  unsigned order = units <= 1
                     ? 0
                     : static_cast<unsigned>(std::bit_width(units - 1));
  auto from = order;
  while (from < free_.size() && free_[from].empty())
    ++from;
  if (from >= free_.size())
    return std::nullopt;
  auto offset = *free_[from].begin();
  free_[from].erase(free_[from].begin());
  // The upper halves stay free.
  while (from > order) {
    --from;
    free_[from].insert(offset + size_of(from));
  }
  taken_.emplace(offset, part{order, size});
  used_ += size_of(order);
  wanted_ += size;
  return offset;
}

void buddy_allocator::release(uint64_t offset) {
  auto i = taken_.find(offset);
  if (i == taken_.end())
    throw error{error_code::internal,
                "nothing was allocated at " + std::to_string(offset)};
  auto order = i->second.order;
  used_ -= size_of(order);
  wanted_ -= i->second.wanted;
  taken_.erase(i);
  while (order + 1 < free_.size()
         && free_[order].erase(offset ^ size_of(order)) > 0) {
    offset &= ~size_of(order);
    ++order;
  }
  free_[order].insert(offset);
}

uint64_t buddy_allocator::largest_free() const noexcept {
  for (auto order = free_.size(); order-- > 0;)
    if (!free_[order].empty())
      return size_of(static_cast<unsigned>(order));
  return 0;
}

} // namespace smp
