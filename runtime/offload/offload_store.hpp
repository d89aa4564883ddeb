#pragma once

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

/// Memory that is given away until it is asked for again: bytes go to a file
/// on a thread of their own, while the caller goes on, and come back on the
/// same thread before they are wanted (R57).
///
/// What is given away together is a set. Sets of one lane (a microbatch) come
/// back in the opposite order, as backward goes; lanes in the order in which
/// they are announced, but one from which a set is taken goes first. Of that
/// order the next `horizon` sets are in memory or on their way back. At most as
/// many are on their way out: who gives more waits for the file.
///
/// What the file has no room for stays in memory. Thread-safe.
class offload_store : public std::enable_shared_from_this<offload_store> {
public:
  struct options {
    std::string dir; // for texts
    uint64_t horizon = 4;
    /// After which a wait for the file is an error.
    std::chrono::milliseconds patience{300'000};
    /// Hears once that the file has no room. On the thread of the file.
    std::function<void(const std::string&)> warn;
  };

  struct counts {
    uint64_t bytes = 0; // in the file now
    uint64_t peak_bytes = 0;
    uint64_t file_bytes = 0; // its length
    uint64_t written = 0;    // since the begin
    uint64_t read = 0;       // since the begin
    uint64_t stayed = 0;     // for lack of room, since the begin
    double wait_seconds = 0; // of those who gave and took, since the begin
  };

  /// Some bytes of a storage.
  struct part {
    c10::Storage memory;
    uint64_t offset = 0;
    uint64_t bytes = 0;
    /// As a tensor over it counts what changes it in place.
    uint32_t version = 0;
  };

private:
  struct block;
  struct entry;

public:
  /// What was given away together. Its end frees what was not taken.
  class set {
  public:
    explicit set(std::shared_ptr<offload_store> store,
                 std::shared_ptr<entry> x);
    ~set();
    set(const set&) = delete;
    set& operator=(const set&) = delete;

    /// Waits until all is in memory. Once only.
    /// @returns the same bytes, by part, perhaps elsewhere; an address is the
    /// same modulo 64 as it was
    /// @throws error (transport) if the file fails, or after
    /// `options::patience`
    std::vector<part> take();

  private:
    std::shared_ptr<offload_store> store_;
    std::shared_ptr<entry> entry_;
  };

  static std::shared_ptr<offload_store> make(std::unique_ptr<offload_file> file,
                                             options x);

  ~offload_store();

  /// @param xs nobody changes these bytes any more. The same bytes may be given
  /// several times, and are written once
  /// @throws error (transport) after `options::patience`
  std::unique_ptr<set> give(uint64_t lane, std::vector<part> xs);

  /// The sets of a lane will be wanted, after those of lanes before.
  void announce(uint64_t lane);

  /// Lanes begin anew.
  void end_step();

  /// Nothing is written or read any more; what is in the file is lost.
  void stop();

  counts status() const;

private:
  using guard = std::unique_lock<std::mutex>;
  using key = std::tuple<const void*, uint64_t, uint64_t, uint32_t>;
  using block_ptr = std::shared_ptr<block>;
  using entry_ptr = std::shared_ptr<entry>;

  offload_store(std::unique_ptr<offload_file> file, options x);

  block_ptr block_of(const part& x);
  std::vector<part> take(entry& x);
  void remove(entry& x, std::vector<c10::Storage>& freed);
  void release(block& x, std::vector<c10::Storage>& freed);
  void free_slot(block& x);
  void want(entry& x, bool first);
  void look_ahead();
  void await(guard& held, const char* what, const std::function<bool()>& done);

  // -- thread of the file -----------------------------------------------------

  void run();
  block_ptr next_read();
  block_ptr next_write();
  void moved(guard& held, block& x, c10::Storage memory);
  void read(guard& held, const block_ptr& x);
  void write(guard& held, const block_ptr& x);
  /// @returns errno
  int make_room(guard& held, uint64_t bytes);
  void refuse(guard& held, block& x, int why);
  failure failed(const char* what, int why) const;

  options options_;
  std::unique_ptr<offload_file> file_; // the thread's
  mutable std::mutex mutex_;
  std::condition_variable work_;
  std::condition_variable done_;
  file_slots slots_;
  std::map<uint64_t, std::vector<entry*>> lanes_;
  std::vector<uint64_t> order_; // of lanes that were announced
  std::deque<entry_ptr> writes_;
  std::deque<block_ptr> reads_;
  std::map<key, std::pair<c10::weak_intrusive_ptr<c10::StorageImpl>,
                          std::weak_ptr<block>>>
    given_; // in this step
  counts counts_;
  bool full_ = false; // in this step
  bool warned_ = false;
  bool stopping_ = false;
  std::thread thread_;
};

} // namespace smp
