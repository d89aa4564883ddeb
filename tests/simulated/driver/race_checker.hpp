#pragma once

#include "tests/simulated/driver/races.hpp"

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <span>
#include <string>
#include <vector>

namespace smp::sim {

/// One entry per stream: up to which launch of that stream somebody knows that
/// everything has been done.
using clock_vector = std::vector<uint64_t>;

void join(clock_vector& into, const clock_vector& from);

/// Who launches what.
struct launch_site {
  /// Of the stream, among those of all devices.
  size_t slot;
  const char* kernel;
};

/// Knows the last accesses to each block of memory. Its mutex also protects the
/// clocks of streams and events.
class race_checker {
public:
  /// Memory is known from when it is allocated, also while nobody checks:
  /// somebody may begin to.
  void know(const void* begin, size_t size);

  void forget(const void* begin, size_t size);

  /// The caller holds what lock() gave.
  /// @param seen the clock of the stream, which goes on by one launch
  /// @param also what these accesses are ordered after beside `seen`
  void launched(clock_vector& seen, launch_site, std::span<const access>,
                const clock_vector& also);

  /// @returns the mutex, locked if somebody checks at the moment
  std::unique_lock<std::mutex> lock();

  /// The host has waited for, or seen, what `clock` stands for.
  void host_saw(const clock_vector& clock);

  /// What the host knows to be done.
  const clock_vector& host() const {
    return host_;
  }

  uint64_t races();

  std::string last();

  void forget_races();

private:
  struct past_access {
    uintptr_t begin, end;
    bool write;
    launch_site site;
    uint64_t time;
  };

  struct block {
    uintptr_t end;
    std::vector<past_access> past;
  };

  block* find(uintptr_t address);

  void touch(const clock_vector& seen, const past_access& now);

  void report(const past_access& now, const past_access& before);

  std::mutex mutex_;
  clock_vector host_;
  std::map<uintptr_t, block> blocks_;
  uint64_t races_ = 0;
  std::string last_;
};

race_checker& checker();

} // namespace smp::sim
