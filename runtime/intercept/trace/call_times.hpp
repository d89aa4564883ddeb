#pragma once

#include "partition/trace.hpp"

#include <c10/core/Device.h>
#include <c10/core/Event.h>

#include <chrono>
#include <cstddef>
#include <memory>
#include <optional>
#include <vector>

namespace smp {

/// How long calls take that a thread makes, without those that they make. On a
/// device, which works behind the host, they begin and end where its stream
/// does what was launched then: only who wants the times waits for it.
class call_times {
public:
  /// @param where modules compute
  explicit call_times(c10::Device where) : where_(where) {
    // nop
  }

  /// A call of `x` begins, inside the one that began last and goes on.
  /// @param x nothing: what takes time, but belongs to no module
  /// @returns its number
  size_t begin(std::optional<module_id> x);

  /// What was done since it began, as passing its arguments, does not count.
  void start();

  /// From here on nothing counts. Only the first time.
  void stop();

  /// Call `n` ends. Those in it that go on do not count.
  void end(size_t n);

  /// Forgets all calls but the first `n`.
  void resize(size_t n);

  /// Waits for the device. Of one that has failed, nothing counts.
  /// @returns seconds of the calls after the first `n` that have ended, by
  /// module
  std::vector<double> seconds(size_t modules, size_t n) const;

private:
  struct point {
    std::chrono::steady_clock::time_point host;
    std::shared_ptr<c10::Event> device; // null: the host's counts
  };

  struct call {
    std::optional<module_id> module;
    std::optional<size_t> caller;
    point begin;
    point start;
    std::optional<point> stop;
    std::optional<point> end;
  };

  point now() const;

  static double between(const point& a, const point& b);

  c10::Device where_;
  std::vector<call> calls_;
  std::optional<size_t> current_;
};

} // namespace smp
