#include "tests/simulated/driver/race_checker.hpp"

#include "tests/simulated/driver/options.hpp"

#include <algorithm>

namespace smp::sim {

namespace {

uint64_t entry(const clock_vector& clock, size_t slot) {
  return slot < clock.size() ? clock[slot] : 0;
}

std::string described(bool write, const launch_site& site) {
  return std::string{write ? "write" : "read"} + " by " + site.kernel
         + " on stream #" + std::to_string(site.slot);
}

uintptr_t address_of(const void* pointer) {
  return reinterpret_cast<uintptr_t>(pointer);
}

} // namespace

void join(clock_vector& into, const clock_vector& from) {
  if (into.size() < from.size())
    into.resize(from.size());
  for (size_t i = 0; i < from.size(); ++i)
    into[i] = std::max(into[i], from[i]);
}

void race_checker::know(const void* begin, size_t size) {
  std::lock_guard guard{mutex_};
  blocks_[address_of(begin)].end = address_of(begin) + size;
}

void race_checker::forget(const void* begin, size_t size) {
  std::lock_guard guard{mutex_};
  blocks_.erase(blocks_.lower_bound(address_of(begin)),
                blocks_.lower_bound(address_of(begin) + size));
}

std::unique_lock<std::mutex> race_checker::lock() {
  if (config().check)
    return std::unique_lock{mutex_};
  return std::unique_lock{mutex_, std::defer_lock};
}

void race_checker::launched(clock_vector& seen, launch_site site,
                            std::span<const access> accesses,
                            const clock_vector& also) {
  join(seen, host_);
  if (seen.size() <= site.slot)
    seen.resize(site.slot + 1);
  auto time = ++seen[site.slot];
  auto known = seen;
  join(known, also);
  for (const auto& x : accesses) {
    auto begin = address_of(x.begin);
    if (x.size > 0)
      touch(known, {begin, begin + x.size, x.write, site, time});
  }
}

void race_checker::host_saw(const clock_vector& clock) {
  if (auto guard = lock())
    join(host_, clock);
}

uint64_t race_checker::races() {
  std::lock_guard guard{mutex_};
  return races_;
}

std::string race_checker::last() {
  std::lock_guard guard{mutex_};
  return last_;
}

void race_checker::forget_races() {
  std::lock_guard guard{mutex_};
  races_ = 0;
  last_.clear();
}

race_checker::block* race_checker::find(uintptr_t address) {
  auto i = blocks_.upper_bound(address);
  if (i == blocks_.begin())
    return nullptr;
  --i;
  return address < i->second.end ? &i->second : nullptr;
}

void race_checker::touch(const clock_vector& seen, const past_access& now) {
  auto* touched = find(now.begin);
  if (touched == nullptr)
    return;
  std::erase_if(touched->past, [&](const past_access& before) {
    if (before.end <= now.begin || now.end <= before.begin)
      return false;
    auto ordered = entry(seen, before.site.slot) >= before.time;
    if ((before.write || now.write) && !ordered)
      report(now, before);
    // Whoever is ordered after `now` is ordered after `before`.
    return ordered && before.begin >= now.begin && before.end <= now.end
           && (now.write || !before.write);
  });
  touched->past.push_back(now);
}

void race_checker::report(const past_access& now, const past_access& before) {
  ++races_;
  last_ = described(now.write, now.site) + " is not ordered after "
          + described(before.write, before.site);
}

race_checker& checker() {
  // Never destroyed: kernels may run while the process ends.
  static auto* const only = new race_checker;
  return *only;
}

uint64_t races_found() {
  return checker().races();
}

std::string last_race() {
  return checker().last();
}

void forget_races() {
  checker().forget_races();
}

} // namespace smp::sim
