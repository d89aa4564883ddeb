#include "tests/simulated/backend/allocators.hpp"
#include "tests/simulated/driver/event_state.hpp"
#include "tests/simulated/driver/events.hpp"
#include "tests/simulated/driver/options.hpp"
#include "tests/simulated/driver/stream.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

namespace smp::sim {

namespace {

/// The blocks of pinned memory, and who still copies from or to them.
class pinned_blocks {
public:
  void* allocate(size_t bytes) {
    auto* made = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    TORCH_CHECK(made != MAP_FAILED, "sim: out of host memory");
    if (config().poison)
      std::memset(made, 0xff, bytes);
    std::lock_guard guard{mutex_};
    sweep();
    blocks_[reinterpret_cast<uintptr_t>(made)] = {bytes, {}};
    return made;
  }

  // Not before the last copy that somebody has recorded.
  void free(void* begin) {
    std::lock_guard guard{mutex_};
    auto found = blocks_.find(reinterpret_cast<uintptr_t>(begin));
    if (!found->second.users.empty())
      no_host_function("freeing pinned memory that copies have used");
    leaving_.emplace_back(found->first, std::move(found->second));
    blocks_.erase(found);
    sweep();
  }

  void release_unused() {
    std::lock_guard guard{mutex_};
    sweep();
  }

  bool contains(const void* address) {
    std::lock_guard guard{mutex_};
    return find(address) != nullptr;
  }

  /// @returns whether the block is one of these
  bool use_until(const void* address, const event& last) {
    std::lock_guard guard{mutex_};
    auto* found = find(address);
    if (found != nullptr)
      found->users.push_back(last);
    return found != nullptr;
  }

private:
  struct block {
    size_t size = 0;
    std::vector<event> users;
  };

  block* find(const void* pointer) {
    auto address = reinterpret_cast<uintptr_t>(pointer);
    auto found = blocks_.upper_bound(address);
    if (found == blocks_.begin())
      return nullptr;
    --found;
    auto inside = address < found->first + found->second.size;
    return inside ? &found->second : nullptr;
  }

  void sweep() {
    std::erase_if(leaving_, [](const auto& x) {
      if (!std::ranges::all_of(x.second.users, reached))
        return false;
      munmap(reinterpret_cast<void*>(x.first), x.second.size);
      return true;
    });
  }

  std::mutex mutex_;
  std::map<uintptr_t, block> blocks_; // by begin
  std::vector<std::pair<uintptr_t, block>> leaving_;
};

pinned_blocks& blocks() {
  static auto* const only = new pinned_blocks;
  return *only;
}

void free_pinned(void* begin) {
  blocks().free(begin);
}

class sim_host_allocator final : public at::HostAllocator {
public:
  c10::DataPtr allocate(size_t bytes) override {
    constexpr size_t page = 4096;
    if (bytes == 0)
      return {nullptr, c10::Device{c10::kCPU}};
    auto* made = blocks().allocate((bytes + page - 1) / page * page);
    return {made, made, &free_pinned, c10::Device{c10::kCPU}};
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return &free_pinned;
  }

  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

  bool record_event(void* address, void*, c10::Stream user) override {
    auto last = make_event();
    record(last, user.device_index(), user.id());
    return blocks().use_until(address, last);
  }

  void empty_cache() override {
    blocks().release_unused();
  }

  at::HostStats get_stats() override {
    return {};
  }

  void reset_accumulated_stats() override {
    // nop
  }

  void reset_peak_stats() override {
    // nop
  }
};

} // namespace

at::HostAllocator& pinned_allocator() {
  static auto* const only = new sim_host_allocator;
  return *only;
}

bool is_pinned(const void* address) {
  return blocks().contains(address);
}

} // namespace smp::sim
