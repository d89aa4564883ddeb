#pragma once

#include "tests/simulated/driver/events.hpp"
#include "tests/simulated/driver/race_checker.hpp"

#include <atomic>
#include <cstdint>

namespace smp::sim {

/// Counts the records that were asked for and those that streams have reached,
/// in memory that several processes may have mapped.
class event_state {
public:
  /// For this process.
  event_state();

  /// @param file has a page for the counts, or what another process exported
  explicit event_state(int file);

  ~event_state();

  event_state(const event_state&) = delete;

  event_state& operator=(const event_state&) = delete;

  /// @returns the number of this record
  uint32_t ask();

  uint32_t asked() const;

  void reach(uint32_t record);

  bool reached(uint32_t record) const;

  /// Waits for it, or until the process ends.
  void await(uint32_t record) const;

  int64_t reached_at_ns() const {
    return reached_at_ns_;
  }

  /// -1 without one.
  int file() const {
    return file_;
  }

  /// What was done before the last record; under the checker's mutex.
  clock_vector seen;

private:
  struct counts {
    std::atomic<uint32_t> asked{0};
    std::atomic<uint32_t> reached{0};
  };

  counts own_;
  counts* counts_;
  int file_;
  std::atomic<int64_t> reached_at_ns_{0};
};

/// As done(), but the checker takes it for no knowledge of the program.
bool reached(const event&);

} // namespace smp::sim
