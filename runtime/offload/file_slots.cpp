#include "runtime/offload/file_slots.hpp"

#include <iterator>

namespace smp {

namespace {

uint64_t whole(uint64_t bytes) {
  constexpr auto g = file_slots::granule;
  return (bytes + g - 1) / g * g;
}

} // namespace

std::optional<file_slots::slot> file_slots::take(uint64_t bytes) {
  auto wanted = whole(bytes);
  auto best = free_.end();
  for (auto i = free_.begin(); i != free_.end(); ++i)
    if (i->second >= wanted
        && (best == free_.end() || i->second < best->second))
      best = i;
  if (best == free_.end())
    return std::nullopt;
  auto [offset, size] = *best;
  free_.erase(best);
  if (size > wanted)
    free_.emplace(offset + wanted, size - wanted);
  in_use_ += wanted;
  return slot{offset, wanted};
}

void file_slots::give_back(slot freed) {
  in_use_ -= freed.bytes;
  auto after = free_.lower_bound(freed.offset);
  if (after != free_.end() && freed.offset + freed.bytes == after->first) {
    freed.bytes += after->second;
    after = free_.erase(after);
  }
  if (after != free_.begin())
    if (auto before = std::prev(after);
        before->first + before->second == freed.offset) {
      before->second += freed.bytes;
      return;
    }
  free_.emplace_hint(after, freed.offset, freed.bytes);
}

uint64_t file_slots::missing(uint64_t bytes) const {
  auto wanted = whole(bytes);
  for (auto& [offset, size] : free_)
    if (size >= wanted)
      return 0;
  if (!free_.empty())
    if (auto last = *free_.rbegin(); last.first + last.second == size_)
      return wanted - last.second;
  return wanted;
}

void file_slots::grow(uint64_t bytes) {
  if (bytes == 0)
    return;
  in_use_ += bytes;
  give_back({size_, bytes});
  size_ += bytes;
}

} // namespace smp
