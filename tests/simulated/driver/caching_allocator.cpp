#include "tests/simulated/driver/event_state.hpp"
#include "tests/simulated/driver/host_waits.hpp"
#include "tests/simulated/driver/memory.hpp"
#include "tests/simulated/driver/options.hpp"
#include "tests/simulated/driver/race_checker.hpp"
#include "tests/simulated/driver/segments.hpp"
#include "tests/simulated/driver/stream.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <mutex>
#include <stdexcept>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

namespace smp::sim {

namespace {

/// Smaller blocks are cut out of segments that several share.
constexpr auto smallest_whole = segment_size / 2;

struct block {
  void* begin;
  size_t size;
  int device;
  int64_t stream;
  std::vector<std::pair<int, int64_t>> others; // use_on()
};

size_t round_up(size_t size, size_t unit) {
  return (size + unit - 1) / unit * unit;
}

// Quarter steps between powers of two, so that blocks fit again.
size_t size_class(size_t bytes) {
  bytes = std::max<size_t>(bytes, 512);
  size_t power = 512;
  while (power * 2 <= bytes)
    power *= 2;
  return round_up(bytes, std::max<size_t>(power / 4, 128));
}

/// For the checker this is a write, with or without poison: whoever still uses
/// the block is not ordered with it.
void overwrite(const block& gone, const char* name,
               const clock_vector& also = {}) {
  if (!config().poison && !config().check)
    return;
  std::function<void()> fill = [] {};
  if (config().poison)
    fill = [view = kernel_view_of(gone.begin), size = gone.size] {
      std::memset(view, 0xff, size);
    };
  push_after(also, gone.device, gone.stream, name, std::move(fill),
             {{gone.begin, gone.size, true}});
}

// Nothing is launched while the mutex is held.
class caching_allocator {
public:
  void* allocate(int device, int64_t stream, size_t bytes) {
    collect();
    block made{nullptr, size_class(bytes), device, stream, {}};
    if (!take_idle(made)) {
      if (!take_fresh(made)) {
        empty_cache(device);
        if (!take_fresh(made))
          return nullptr;
      }
      checker().know(made.begin, made.size);
      overwrite(made, "fresh memory");
    }
    enter(made);
    return made.begin;
  }

  void free(void* begin) {
    auto gone = leave(begin);
    if (gone.others.empty()) {
      overwrite(gone, "free");
      std::lock_guard guard{mutex_};
      make_idle(gone);
      return;
    }
    std::vector<event> uses;
    for (auto [device, stream] : gone.others) {
      uses.push_back(make_event());
      record(uses.back(), device, stream);
    }
    std::lock_guard guard{mutex_};
    in_use_.emplace_back(std::move(gone), std::move(uses));
  }

  void use_on(void* begin, int device, int64_t stream) {
    std::lock_guard guard{mutex_};
    auto found = live_.find(begin);
    if (found == live_.end()
        || (found->second.device == device && found->second.stream == stream))
      return;
    auto& others = found->second.others;
    if (std::ranges::find(others, std::pair{device, stream}) == others.end())
      others.emplace_back(device, stream);
  }

  void empty_cache(int device) {
    settle_device(device);
    collect();
    for (auto* begin : take_whole(device))
      raw_free(begin);
  }

  memory_info memory(int device) {
    std::lock_guard guard{mutex_};
    auto used = segments().used(device);
    const auto& [allocated, peak] = of(device);
    return {config().capacity - used, config().capacity, allocated, peak};
  }

  void reset_peak(int device) {
    std::lock_guard guard{mutex_};
    of(device).peak = of(device).allocated;
  }

private:
  struct amounts {
    size_t allocated = 0, peak = 0;
  };

  struct free_part {
    char* next = nullptr;
    char* end = nullptr;
  };

  using freed_block = std::pair<block, std::vector<event>>;

  amounts& of(int device) {
    return amounts_.at(static_cast<size_t>(device));
  }

  // Blocks that other streams were using become free as those get there.
  void collect() {
    for (auto& [gone, uses] : take_unused()) {
      clock_vector known;
      if (auto guard = checker().lock())
        for (auto& use : uses)
          join(known, use->seen);
      overwrite(gone, "free", known);
      std::lock_guard guard{mutex_};
      make_idle(gone);
    }
  }

  std::vector<freed_block> take_unused() {
    std::lock_guard guard{mutex_};
    auto still = std::partition(in_use_.begin(), in_use_.end(),
                                [](const freed_block& x) {
                                  return std::ranges::all_of(x.second, reached);
                                });
    std::vector<freed_block> result{std::make_move_iterator(in_use_.begin()),
                                    std::make_move_iterator(still)};
    in_use_.erase(in_use_.begin(), still);
    return result;
  }

  void make_idle(const block& gone) {
    idle_[{gone.device, gone.stream, gone.size}].push_back(gone.begin);
  }

  bool take_idle(block& made) {
    std::lock_guard guard{mutex_};
    auto& blocks = idle_[{made.device, made.stream, made.size}];
    if (blocks.empty())
      return false;
    made.begin = blocks.back();
    blocks.pop_back();
    return true;
  }

  bool take_fresh(block& made) {
    made.begin = made.size < smallest_whole
                   ? carve(made)
                   : raw_allocate(made.device, made.size);
    return made.begin != nullptr;
  }

  void* carve(const block& made) {
    std::lock_guard guard{mutex_};
    auto& [next, end] = carving_[{made.device, made.stream}];
    if (static_cast<size_t>(end - next) < made.size) {
      auto* fresh = static_cast<char*>(raw_allocate(made.device, segment_size));
      if (fresh == nullptr)
        return nullptr;
      next = fresh;
      end = fresh + segment_size;
    }
    return std::exchange(next, next + made.size);
  }

  std::vector<void*> take_whole(int device) {
    std::lock_guard guard{mutex_};
    std::vector<void*> result;
    for (auto& [key, blocks] : idle_) {
      auto [of_device, stream, size] = key;
      if (of_device != device || size < smallest_whole)
        continue;
      result.insert(result.end(), blocks.begin(), blocks.end());
      blocks.clear();
    }
    return result;
  }

  void enter(const block& made) {
    std::lock_guard guard{mutex_};
    live_[made.begin] = made;
    auto& [allocated, peak] = of(made.device);
    allocated += made.size;
    peak = std::max(peak, allocated);
  }

  block leave(void* begin) {
    std::lock_guard guard{mutex_};
    auto found = live_.find(begin);
    if (found == live_.end())
      throw std::runtime_error{
        "simulated device: freeing what was not allocated"};
    auto result = std::move(found->second);
    live_.erase(found);
    of(result.device).allocated -= result.size;
    return result;
  }

  std::mutex mutex_;
  std::unordered_map<void*, block> live_;
  std::map<std::tuple<int, int64_t, size_t>, std::vector<void*>> idle_;
  std::vector<freed_block> in_use_; // freed, but not yet by all streams
  std::map<std::pair<int, int64_t>, free_part> carving_;
  std::array<amounts, max_devices> amounts_;
};

caching_allocator& cache() {
  static auto* const only = new caching_allocator;
  return *only;
}

} // namespace

void* allocate(int device, int64_t stream, size_t bytes) {
  return bytes == 0 ? nullptr : cache().allocate(device, stream, bytes);
}

void free(void* begin) {
  if (begin != nullptr)
    cache().free(begin);
}

void use_on(void* begin, int device, int64_t stream) {
  cache().use_on(begin, device, stream);
}

void empty_cache(int device) {
  cache().empty_cache(device);
}

memory_info memory(int device) {
  return cache().memory(device);
}

void reset_peak(int device) {
  cache().reset_peak(device);
}

} // namespace smp::sim
