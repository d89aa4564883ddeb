#pragma once

#include "transport/flight/flight_event.hpp"
#include "transport/wait.hpp"

#include <atomic>
#include <chrono>
#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace smp {

/// All events from its beginning on, until there are too many. Made by
/// `flight_record::trace`.
class flight_trace {
public:
  /// @param until a time after which nothing is added, as of events
  flight_trace(size_t limit, int64_t until) : limit_(limit), until_(until) {
    // nop
  }

  /// @returns false if it is over
  bool add(const flight_event& x);

  /// @returns the events so far, in no strict order
  std::vector<flight_event> take();

  /// @returns how many did not fit
  uint64_t lost() const;

private:
  const size_t limit_;
  const int64_t until_;
  mutable std::mutex mutex_;
  std::vector<flight_event> events_;
  uint64_t lost_ = 0;
};

/// When a run fails, what its ranks did just before explains it, and nobody had
/// asked for a trace. So each rank notes its last events, always, in memory of
/// a fixed size, without a lock and without allocating. The memory may be
/// shared with the launcher, which then reads the events of a rank that was
/// killed. Thread-safe; an event costs some 50 ns.
class flight_record {
public:
  /// Events that are kept.
  static constexpr size_t capacity = size_t{1} << 14;

  /// Bytes of an image.
  static size_t image_size() noexcept;

  /// In memory of its own.
  explicit flight_record(rank_id self);

  /// In `memory`, of `image_size()` bytes that start a page: zeros, or what an
  /// earlier record of this process left there.
  flight_record(rank_id self, std::shared_ptr<std::byte> memory);

  flight_record(const flight_record&) = delete;
  flight_record& operator=(const flight_record&) = delete;

  /// Notes `x` as happening now.
  void note(flight_event x) noexcept;

  /// @returns the number that stands for `text` in `flight_event::name`
  uint32_t name(std::string_view text);

  /// @returns the same for what a wait is for
  uint32_t name(const wait_reason& x);

  /// Makes events name modules by their paths.
  void name_modules(std::span<const std::string> path_of);

  /// @returns a copy of the last events, for `read_flight_image`
  std::vector<std::byte> image(size_t limit = capacity) const {
    return image_of(memory_.get(), limit);
  }

  /// @returns the same of a record of any process; nothing if there was none
  /// @param limit at most so many events, the last ones
  static std::vector<std::byte> image_of(std::byte* memory,
                                         size_t limit = capacity);

  /// @returns an image of other events of this rank: those of a trace
  std::vector<std::byte> image(std::span<const flight_event> events,
                               uint64_t lost) const;

  /// @returns all events from now on, as long as that is referenced, but not
  /// for longer than `life`
  std::shared_ptr<flight_trace>
  trace(size_t limit = size_t{2} << 20,
        std::chrono::seconds life = std::chrono::hours{24 * 365});

  /// @returns whether anybody traces: then also note what only traces have.
  bool tracing() const noexcept {
    return tracing_.load(std::memory_order_relaxed);
  }

private:
  /// @returns whether there was room
  bool add_name(uint32_t key, std::string_view text);
  void add_to_traces(const flight_event& x);

  const std::shared_ptr<std::byte> memory_;
  mutable std::mutex mutex_;
  std::map<std::string, uint32_t, std::less<>> names_;
  std::atomic<bool> tracing_ = false;
  std::vector<std::weak_ptr<flight_trace>> traces_;
};

/// Notes an activity of the user's thread while it lives.
class flight_activity {
public:
  flight_activity(flight_record& where, std::string_view what)
    : flight_activity(where, where.name(what)) {
    // nop
  }

  flight_activity(flight_record& where, uint32_t name)
    : where_(where), name_(name) {
    note(flight_kind::activity_begins);
  }

  ~flight_activity() {
    note(flight_kind::activity_ends);
  }

  flight_activity(const flight_activity&) = delete;
  flight_activity& operator=(const flight_activity&) = delete;

private:
  void note(flight_kind kind) {
    flight_event x;
    x.kind = kind;
    x.name = name_;
    where_.note(x);
  }

  flight_record& where_;
  const uint32_t name_;
};

} // namespace smp
