#pragma once

#include "runtime/device/storage_copies.hpp"
#include "runtime/offload/file_slots.hpp"
#include "runtime/offload/offload_file.hpp"
#include "transport/error.hpp"

#include <c10/core/Storage.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

namespace smp {

struct doorbell;
struct saved_block;

/// Keeps bytes of tensors in a file between forward and backward (R57). Its own
/// thread writes them while the caller continues, and reads them back before
/// they are needed.
///
/// The bytes of one call to `give` are a set, and each set belongs to a lane (a
/// microbatch). The sets of a lane are needed in the opposite order, as in
/// backward. Lanes are needed in the order in which they are announced, except
/// that the lane of the last `take` comes first. The next `horizon` sets of
/// this order are in memory or being read. At most `horizon` sets wait to be
/// written: `give` then waits for the file.
///
/// The bytes of a device are copied to pinned memory first, and written when
/// the device has done so; `give` does not wait for that, but the file does.
/// What is read goes to pinned memory as well. `take` lets the device copy its
/// set and, as long as the kernels need that one, the next.
///
/// Bytes for which the file has no space stay in memory. Thread-safe.
class offload_store : public std::enable_shared_from_this<offload_store> {
public:
  struct options {
    std::string dir; // for messages
    uint64_t horizon = 4;
    /// A longer wait for the file is an error.
    std::chrono::milliseconds patience{300'000};
    /// Called once if the file has no space, on the thread of the file.
    std::function<void(const std::string&)> warn;
    /// Whose bytes are given beside those of the host; null: none.
    std::shared_ptr<storage_copies> device;
  };

  struct counts {
    uint64_t bytes = 0;      // in the file now
    uint64_t peak_bytes = 0; // the most that were in the file
    uint64_t file_bytes = 0; // its length
    // In total:
    uint64_t written = 0;
    uint64_t read = 0;
    uint64_t stayed = 0;     // bytes kept in memory, as there was no space
    double wait_seconds = 0; // in `give` and `take`
  };

  /// A range of bytes of a storage.
  struct part {
    c10::Storage memory;
    uint64_t offset = 0;
    uint64_t bytes = 0;
    /// The tensor's version: it counts changes in place.
    uint32_t version = 0;
  };

private:
  struct leftovers;
  struct saved_set;

public:
  /// The bytes of one `give`. The destructor frees what was not taken.
  class set {
  public:
    explicit set(std::shared_ptr<offload_store> store,
                 std::shared_ptr<saved_set> content);
    ~set();
    set(const set&) = delete;
    set& operator=(const set&) = delete;

    /// Waits until all bytes are in memory of the host. May be called once.
    /// @returns the same bytes where they were, one entry per part. They may
    /// have another address, which is equal modulo 64. Those on a device are
    /// there for what is launched from now on
    /// @throws error (transport) if the file cannot be read or written, or
    /// after `options::patience`
    std::vector<part> take();

  private:
    std::shared_ptr<offload_store> store_;
    std::shared_ptr<saved_set> content_;
  };

  static std::shared_ptr<offload_store> make(std::unique_ptr<offload_file> file,
                                             options settings);

  ~offload_store();

  /// Tells whether bytes on `x` may be given.
  bool takes(c10::Device x) const;

  /// @param parts in memory of the host or on `options::device`; must not
  /// change any more; bytes that are given several times are written once
  /// @throws error (transport) after `options::patience`
  std::unique_ptr<set> give(uint64_t lane, std::vector<part> parts);

  /// The sets of this lane will be needed, after those of lanes that were
  /// announced before.
  void announce(uint64_t lane);

  /// Forgets all lanes, their order and which bytes were given.
  void end_step();

  /// Ends the thread. What is in the file is lost, and waits fail.
  void stop();

  counts status() const;

private:
  using guard = std::unique_lock<std::mutex>;
  using clock = std::chrono::steady_clock;
  using key = std::tuple<const void*, uint64_t, uint64_t, uint32_t>;
  using block_ptr = std::shared_ptr<saved_block>;
  using set_ptr = std::shared_ptr<saved_set>;

  offload_store(std::unique_ptr<offload_file> file, options settings);

  block_ptr find_block(const part& range);
  block_ptr block_of(const part& range, guard& held);
  std::vector<part> take(saved_set& set);
  part bring(saved_block& block, guard& held);
  void bring_next(guard& held);
  std::unique_ptr<lent_storage> to_device(const saved_block& block,
                                          guard& held) const;
  void remove(saved_set& set, leftovers& freed);
  void release(saved_block& block, leftovers& freed);
  void free_slot(saved_block& block);
  void want(saved_set& set, bool first);
  void look_ahead();
  saved_set* next_set() const;
  bool wait_for(guard& held, clock::time_point until,
                const std::function<bool()>& over);
  void await(guard& held, const char* what, const std::function<bool()>& done);

  // -- thread of the file -----------------------------------------------------

  void run();
  void drop_copied(guard& held);
  block_ptr next_read();
  block_ptr next_write();
  void moved(guard& held, saved_block& block, c10::Storage memory);
  void read(guard& held, saved_block& block);
  void write(guard& held, saved_block& block);
  /// @returns errno
  int make_room(guard& held, uint64_t bytes);
  void refuse(guard& held, saved_block& block, int why);
  failure failed(const char* what, int why) const;

  options options_;
  std::unique_ptr<offload_file> file_; // used by the thread only
  std::shared_ptr<doorbell> bell_;
  std::mutex& mutex_;
  std::condition_variable& work_;
  std::condition_variable done_;
  file_slots slots_;
  std::map<uint64_t, std::vector<saved_set*>> lanes_;
  std::vector<uint64_t> order_; // of the announced lanes
  std::deque<set_ptr> writes_;
  std::deque<block_ptr> reads_;
  std::map<key, std::pair<c10::weak_intrusive_ptr<c10::StorageImpl>,
                          std::weak_ptr<saved_block>>>
    given_; // in this step
  /// Memory of the device until its copy is done.
  std::deque<block_ptr> leaving_;
  counts counts_;
  bool full_ = false; // in this step
  bool warned_ = false;
  bool stopping_ = false;
  std::thread thread_;
};

} // namespace smp
