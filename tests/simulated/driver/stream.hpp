#pragma once

#include "tests/simulated/driver/race_checker.hpp"

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

namespace smp::sim {

/// The thread of a stream and what it has to do.
class stream {
public:
  /// @param slot its place among the streams of all devices
  stream(int device, size_t slot, uint64_t seed);

  /// Something short that is no kernel.
  void push(std::function<void()> job);

  void push_kernel(std::function<void()> kernel);

  bool idle();

  /// Until everything that was pushed has been done.
  void wait_until_idle();

  /// The same.
  /// @throws std::runtime_error with what a kernel has thrown since the last
  /// wait
  void settle();

  /// What is queued is not done any more.
  void ask_to_stop();

  void join_thread();

  size_t slot() const {
    return slot_;
  }

  size_t most_queued();

  void reset_most_queued();

  /// What is done before the next launch; under the checker's mutex.
  clock_vector seen;

  /// Something short that is no kernel, and must not use a device.
  void push_host_function(std::function<void()> function);

private:
  void await_idle(std::unique_lock<std::mutex>&);

  enum class kind { internal, kernel, host_function };

  struct job {
    std::function<void()> run;
    kind what;
  };

  void push(job);

  void run();

  /// @returns the text of what it throws
  std::string run_one(job&);

  void delay();

  int device_;
  size_t slot_;
  std::mutex mutex_;
  std::condition_variable work_, idle_;
  std::deque<job> queue_;
  bool busy_ = false, stopped_ = false;
  size_t kernels_ = 0, most_kernels_ = 0;
  std::string error_;
  std::mt19937_64 random_; // only the thread draws
  std::thread thread_;
};

/// @throws std::out_of_range if there is no such stream
stream& find_stream(int device, int64_t id);

/// What the allocator does to memory: as launch(), but no kernel, and nothing
/// waits for it.
/// @param also what these accesses are ordered after beside what the stream is
void push_after(const clock_vector& also, int device, int64_t id,
                const char* name, std::function<void()> job,
                const std::vector<access>& accesses);

/// Waits for everything on the device, which does not count; that a kernel has
/// failed is for the next who waits.
void settle_device(int device);

void settle_all();

/// If a host function calls this, it fails, as a driver's would: it has used
/// the device.
void no_host_function(const char* use) noexcept;

/// Whether the process ends: nobody shall wait any more.
bool stopping();

} // namespace smp::sim
