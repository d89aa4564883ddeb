#pragma once

#include "transport/device_ops.hpp"
#include "transport/error.hpp"
#include "transport/memory/block_pool.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <iterator>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace smp::test {

/// What a device reaches without the host.
struct device_reach {
  /// Devices of the same process, which it then lets read its memory.
  bool peers = false;
  /// Those of other nodes.
  bool rdma = false;
};

/// A device in this process, to find out who treats its memory as that of the
/// host. Its addresses are reserved and never accessible: who touches them
/// faults. Copies run later, on a thread of the device, each as soon as its
/// source is there: they are ordered by their events alone. What was not
/// written yet is 0xFF.
class simulated_device : public device_ops {
public:
  /// The number that LibTorch has for devices of others.
  static constexpr uint8_t type = 20;

  class event : public device_event {
  public:
    void then(std::function<void()> f) override {
      {
        std::lock_guard guard{shared_->mutex};
        if (!happened_)
          return followers_.push_back(std::move(f));
      }
      f();
    }

    bool wait(std::chrono::milliseconds limit) {
      std::unique_lock guard{shared_->mutex};
      return shared_->changed.wait_for(guard, limit,
                                       [this] { return happened_; });
    }

    void happen() {
      std::vector<std::function<void()>> followers;
      {
        std::lock_guard guard{shared_->mutex};
        happened_ = true;
        followers.swap(followers_);
        shared_->changed.notify_all();
      }
      for (auto& f : followers)
        f();
    }

  private:
    friend class simulated_device;

    struct state {
      std::mutex mutex;
      std::condition_variable changed;
    };

    explicit event(std::shared_ptr<state> x) : shared_(std::move(x)) {
      // nop
    }

    std::shared_ptr<state> shared_;
    bool happened_ = false; // guarded by shared_->mutex
    std::vector<std::function<void()>> followers_;
  };

  explicit simulated_device(int16_t index, device_reach x = {})
    : at_{type, index}, reach_(x), thread_([this] { run(); }) {
    // nop
  }

  ~simulated_device() override {
    {
      std::lock_guard guard{shared_->mutex};
      stopping_ = true;
      shared_->changed.notify_all();
    }
    thread_.join();
  }

  simulated_device(const simulated_device&) = delete;
  simulated_device& operator=(const simulated_device&) = delete;

  // -- device_ops -------------------------------------------------------------

  bool rdma() const override {
    return reach_.rdma;
  }

  bool failed() const override {
    return failed_;
  }

  shared_memory share(uint64_t size) override {
    if (!reach_.peers)
      return {};
    return {memory_->take(size), size, at_,
            std::to_string(reinterpret_cast<uintptr_t>(this))};
  }

  shared_memory open(const std::string& handle) override {
    if (!reach_.peers)
      return {};
    // NOLINTNEXTLINE(performance-no-int-to-ptr)
    auto* other = reinterpret_cast<simulated_device*>(std::stoull(handle));
    std::lock_guard guard{shared_->mutex};
    opened_[other->at_.index] = other->memory_;
    auto& [begin, bytes] = *other->memory_->blocks.begin();
    return {{other->memory_, const_cast<std::byte*>(begin)},
            bytes.size(),
            other->at_,
            handle};
  }

  std::optional<device_ref> here(device_ref x) const override {
    if (x == device_ref{})
      return x;
    if (x.type != type)
      return std::nullopt;
    return at_;
  }

  std::shared_ptr<std::byte> allocate(device_ref where,
                                      uint64_t size) override {
    if (where == device_ref{})
      return block_pool{0}.take(size);
    if (where != at_)
      throw error{error_code::unsupported, "another device"};
    return memory_->take(size);
  }

  tensor_ref copy(const tensor_ref& from, std::shared_ptr<std::byte> to,
                  device_ref where) override {
    if (from.device == device_ref{} && where == device_ref{})
      return host_ops{}.copy(from, std::move(to), where);
    if (failed_ || refused_ == from.device)
      throw error{error_code::transport, "the device: a kernel has failed"};
    ++copies_;
    auto result = from;
    auto done = make_event();
    result.data = to.get();
    result.owner = to;
    result.device = where;
    result.ready = done;
    std::lock_guard guard{shared_->mutex};
    waiting_.push_back({from, from.owner, to, where, std::move(done)});
    // As a real device does: who copies has to keep both memories.
    waiting_.back().from.owner.reset();
    shared_->changed.notify_all();
    return result;
  }

  // -- for tests --------------------------------------------------------------

  /// From now on it does nothing any more, as whoever uses it is told.
  void fail() {
    failed_ = true;
  }

  /// From now on copies from that device fail.
  void refuse(device_ref from) {
    refused_ = from;
  }

  /// Those that were begun.
  int copies() const {
    return copies_;
  }

  std::shared_ptr<event> make_event() const {
    return std::shared_ptr<event>{new event{shared_}};
  }

  /// @returns `x`, whose bytes are not written yet, on this device.
  tensor_ref place(tensor_ref x) {
    auto block = memory_->take(x.nbytes);
    x.data = block.get();
    x.owner = std::move(block);
    x.device = at_;
    return x;
  }

  void write(const tensor_ref& to, const std::vector<std::byte>& bytes) {
    if (!bytes.empty())
      std::memcpy(view(to.data, to.device), bytes.data(), bytes.size());
  }

  /// @returns the bytes of a tensor on this device, once they are there.
  std::vector<std::byte> read(const tensor_ref& x) {
    auto limit = std::chrono::seconds{30};
    if (x.device != at_
        || (x.ready && !static_cast<event&>(*x.ready).wait(limit)))
      return {};
    std::vector<std::byte> result(x.nbytes);
    if (x.nbytes > 0)
      std::memcpy(result.data(), view(x.data, x.device), x.nbytes);
    return result;
  }

private:
  /// Where the device finds what its addresses stand for.
  struct memory : std::enable_shared_from_this<memory> {
    std::shared_ptr<std::byte> take(uint64_t size) {
      auto reserved = std::max<uint64_t>(size, 1);
      auto x = ::mmap(nullptr, reserved, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS,
                      -1, 0);
      if (x == MAP_FAILED)
        throw std::bad_alloc{};
      auto block = static_cast<std::byte*>(x);
      std::lock_guard guard{mutex};
      blocks[block].resize(size, std::byte{0xff});
      return {block, [owner = shared_from_this(), reserved](std::byte* y) {
                std::lock_guard guard{owner->mutex};
                owner->blocks.erase(y);
                ::munmap(y, reserved);
              }};
    }

    std::byte* at(const std::byte* x) {
      std::lock_guard guard{mutex};
      auto& [begin, bytes] = *std::prev(blocks.upper_bound(x));
      return bytes.data() + (x - begin);
    }

    std::mutex mutex;
    std::map<const std::byte*, std::vector<std::byte>> blocks;
  };

  struct task {
    tensor_ref from;
    std::weak_ptr<const void> source;
    std::weak_ptr<std::byte> to;
    device_ref where;
    std::shared_ptr<event> done;
  };

  std::byte* view(const void* x, device_ref where) {
    auto at = static_cast<const std::byte*>(x);
    if (where == device_ref{})
      return const_cast<std::byte*>(at);
    return where == at_ ? memory_->at(at) : opened_.at(where.index)->at(at);
  }

  /// @pre the mutex is held, and events are those of this device
  static bool can_begin(const task& x) {
    return !x.from.ready || static_cast<event&>(*x.from.ready).happened_;
  }

  /// Copies nothing if one of the memories is gone.
  void copy(const task& x) {
    auto source = x.source.lock();
    auto to = x.to.lock();
    if (source && to && x.from.nbytes > 0)
      std::memcpy(view(to.get(), x.where), view(x.from.data, x.from.device),
                  x.from.nbytes);
  }

  void run() {
    std::unique_lock guard{shared_->mutex};
    for (;;) {
      auto next = waiting_.end();
      shared_->changed.wait(guard, [&] {
        next = std::find_if(waiting_.begin(), waiting_.end(), can_begin);
        return stopping_ || next != waiting_.end();
      });
      if (stopping_)
        return;
      auto now = std::move(*next);
      waiting_.erase(next);
      guard.unlock();
      copy(now);
      now.done->happen();
      guard.lock();
    }
  }

  const device_ref at_;
  const device_reach reach_;
  std::shared_ptr<memory> memory_ = std::make_shared<memory>();
  std::shared_ptr<event::state> shared_ = std::make_shared<event::state>();
  std::map<int16_t, std::shared_ptr<memory>> opened_;
  std::atomic<bool> failed_ = false;
  std::optional<device_ref> refused_; // constant once something is copied
  std::atomic<int> copies_ = 0;
  std::list<task> waiting_; // guarded by shared_->mutex
  bool stopping_ = false;   // guarded by shared_->mutex
  std::thread thread_;
};

} // namespace smp::test
