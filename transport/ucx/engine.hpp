#pragma once

#include "transport/files/file_descriptor.hpp"
#include "transport/memory/block_pool.hpp"
#include "transport/ucx/ucx_fabric.hpp"
#include "transport/ucx/wire.hpp"
#include "transport/ucx/worker.hpp"
#include "transport/wake_up.hpp"

#include <array>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <new>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <variant>
#include <vector>

namespace smp {

/// Three kinds of threads use the worker: the progress thread, which sleeps
/// until UCX has something to do; senders; and one of the parked threads, which
/// sleeps until the same events and delivers what arrives: the progress thread
/// leaves them to it until it unparks. The holder of `worker_mutex_` may call
/// UCX. No sender waits for that mutex: it leaves its message in the queue, and
/// the holder checks the queue after it unlocks. Callbacks of the user run
/// without any lock.
class ucx_fabric::engine {
public:
  engine(rank_id self, uint64_t world_size, ucx_options options);
  ~engine();

  void start(const std::vector<std::string>& addresses,
             fabric_listener& listener);
  /// @param transfers a name per tensor, or empty: none has one
  void send(rank_id to, message x, std::vector<uint64_t> transfers,
            sent_callback done);
  void park(pollable_wake_up& x);
  void peer_lost(const failure& x);
  void stop(std::chrono::milliseconds limit);

  void place_with(tensor_places& x) noexcept {
    places_ = &x;
  }

  void register_memory(std::shared_ptr<std::byte> x, uint64_t size);

  rank_id self() const noexcept {
    return self_;
  }

  const std::string& address() const noexcept {
    return address_;
  }

  fabric_stats stats() const;
  uint64_t queued_to(rank_id x) const;
  std::string transports_to(rank_id x) const;

private:
  static constexpr unsigned active_message_id = 0;
  static constexpr size_t priorities = 3;

  using clock = std::chrono::steady_clock;
  using worker_lock = std::unique_lock<std::mutex>;

  // -- messages that leave ----------------------------------------------------

  struct outgoing {
    rank_id to;
    message content;
    std::vector<uint64_t> transfers;
    sent_callback done;
    /// Header of the first unit, then the description.
    std::vector<std::byte> description;
    /// Units that have not completed.
    size_t open = 0;
    /// See `ucx_options::priority`.
    uint8_t priority = 0;
    failure why;
  };

  using outgoing_ptr = std::shared_ptr<outgoing>;

  /// The content of one active message.
  struct unit {
    /// Null for a unit that belongs to no message of this rank.
    outgoing_ptr of;
    ucx::unit_header header;
    const void* data = nullptr;
    uint64_t size = 0;
  };

  struct peer;

  /// Lives until UCX has called back.
  struct send_operation {
    engine& self;
    peer& to;
    unit what;
    bool bulk;
    bool marker;
    /// The header of a unit that has no description to carry it.
    std::array<std::byte, ucx::header_size> header = {};
  };

  // -- messages that arrive ---------------------------------------------------

  struct part {
    std::shared_ptr<std::byte> block;
    uint64_t size = 0;
    uint64_t received = 0;
    uint64_t transfer = 0;
    bool as_marked = false;
  };

  /// A message that is not complete. Its units arrive in any order.
  struct assembly {
    std::optional<ucx::description> what;
    std::map<uint32_t, part> parts;
    size_t complete_parts = 0;
    /// Size of its parts and a long description, received or not.
    uint64_t bytes = 0;
  };

  struct receive_operation {
    engine& self;
    peer& from;
    ucx::unit_header header;
    std::shared_ptr<std::byte> block;
    uint64_t size = 0;
  };

  // -- the other ranks --------------------------------------------------------

  enum class peer_state : uint8_t { connected, left, lost };

  struct peer {
    engine* self = nullptr;
    rank_id rank;
    ucp_ep_h endpoint = nullptr;
    std::string transports;
    peer_state state = peer_state::connected;
    failure why; // unless connected
    /// The listener was told of the loss.
    bool reported = false;
    /// To be refused: there was no memory, not even to record why.
    bool starved = false;
    /// The connection is closed at this time, or when the goodbye has left.
    std::optional<clock::time_point> close_at;

    /// Header and data of up to this size, in bytes, are sent by UCX's copies.
    uint64_t eager_limit = 0;
    /// By priority; within one, in the order of sending.
    std::array<std::deque<unit>, priorities> small;
    std::deque<unit> bulk;
    unsigned bulk_open = 0;
    uint64_t bulk_bytes = 0;
    unsigned small_since_marker = 0;
    unsigned markers_open = 0;

    std::map<uint64_t, assembly> partial;
    uint64_t partial_bytes = 0; // of all of them

    /// @returns the queue of the next small unit; null if there is none
    std::deque<unit>* next_small() noexcept {
      for (auto& x : small)
        if (!x.empty())
          return &x;
      return nullptr;
    }
  };

  struct arrival {
    rank_id from;
    message content;
  };

  /// The data of an active message, or the descriptor by which UCX pulls it.
  struct incoming_data {
    void* pointer = nullptr;
    uint64_t size = 0;
    bool rendezvous = false;
  };

  // -- any thread -------------------------------------------------------------

  std::vector<unit> make_units(const outgoing_ptr& x);
  bool queue_is_empty();
  bool has_queued();
  void post_from_here();
  static void tell_sent(outgoing& x);
  void wake();
  failure stopped() const;

  // -- whoever has the worker -------------------------------------------------

  void connect(peer& to, const std::string& address);
  void take_queued_sends();
  void post_ready(peer& to);
  void post(peer& to, unit x, bool bulk);
  void sent(send_operation& x, ucs_status_t status);
  void drop(unit& x, const failure& why);
  void drop_queued(peer& to, const failure& why);

  ucs_status_t arrived(std::span<const std::byte> header, incoming_data data);
  ucs_status_t receive_data(peer& from, const ucx::unit_header& header,
                            incoming_data data);
  std::byte* place_for(receive_operation& x);
  /// @returns null if `from` is refused
  assembly* assembly_of(peer& from, uint64_t number);
  part* part_of(peer& from, const ucx::unit_header& header);
  bool announce(peer& from, assembly& to, uint64_t size);
  void forget(peer& from, uint64_t number);
  void tell_placed(peer& to, const part& x);
  void received(receive_operation& x, ucs_status_t status);
  void described(peer& from, uint64_t number, std::span<const std::byte> bytes);
  void finish_if_complete(peer& from, uint64_t number);
  void deliver(peer& from, message x);
  void refuse(peer& from, error_code code, std::string text);
  void refuse(peer& from, failure why);
  /// Runs `f` in a UCX callback, through which nothing may be thrown; if it
  /// throws, `from` is refused.
  template <class F>
  void guarded(peer& from, F f) noexcept;

  /// Drives UCX, sends what is queued and reports the news to the user.
  /// @returns whether anything happened.
  bool turn(worker_lock& lock);
  /// Unlocks while it reports. @returns whether there was news.
  bool tell(worker_lock& lock);
  bool tell_news(worker_lock& lock);

  /// Ends the connection; a loss unless `x` said goodbye.
  void lose(peer& x, const failure& why);
  /// The same after a goodbye, for a rank that may be alive and listening.
  void part_from(peer& x, const failure& why);
  void give_up(peer& x, const failure& why);
  void close_in_time(peer& x);
  /// @param because_of rank, from 1, that `x` lost; 0: none
  void left(peer& x, uint64_t because_of);
  void report(peer& x);
  void close(peer& x);

  /// Unlocks for a moment, so that other threads can use the worker.
  /// @param since time of the last activity
  /// @returns whether it is too early to sleep
  bool spins(worker_lock& lock, clock::time_point since) const;

  // -- a thread that parks ----------------------------------------------------

  /// Delivers what arrives, without sleeping, until nothing has arrived for a
  /// while or `x` is notified.
  /// @returns false if other threads should deliver
  bool spin(const pollable_wake_up& x);
  /// Sleeps until something arrives or `x` is notified, and delivers.
  /// @returns false if other threads should deliver
  bool poll(pollable_wake_up& x);
  /// @returns false if the calling thread should leave it to others
  bool help();

  // -- progress thread --------------------------------------------------------

  void run();
  /// Sleeps until something happens.
  void wait(worker_lock& lock);
  /// Sleeps. @returns whether only an event of UCX ended the sleep
  bool events_within(std::chrono::microseconds limit);
  /// Sleeps and ignores UCX's events. @returns whether `wake` ended the sleep
  bool sleep_for(std::chrono::microseconds limit);
  /// Sleeps while a parked thread polls for what arrives.
  void wait_for_poller(std::chrono::microseconds limit);
  bool stop_is_due(bool active);
  void take_queued_losses();
  bool has_failed() const;
  void handle_failed();
  void deliver_to_self(outgoing& x, bool closing);
  void say_goodbye(peer& to);
  void close_all(worker_lock& lock);

  // -- called by UCX, which has the worker ------------------------------------

  static ucs_status_t on_active_message(void* self, const void* header,
                                        size_t header_size, void* data,
                                        size_t size,
                                        const ucp_am_recv_param_t* param);
  static void on_sent(void* request, ucs_status_t status, void* operation);
  static void on_received(void* request, ucs_status_t status, size_t size,
                          void* operation);
  static void on_flushed(void* request, ucs_status_t status, void* peer);
  static void flushed(peer& to);
  static void on_closed(void* request, ucs_status_t status, void* self);
  static void on_endpoint_error(void* peer, ucp_ep_h endpoint,
                                ucs_status_t status);

  // -- constant after construction --------------------------------------------

  const rank_id self_;
  const ucx_options options_;
  block_pool pool_;
  tensor_places* places_ = nullptr;
  std::optional<ucx::worker> worker_;
  std::string address_;
  size_t max_header_ = 0;
  /// A marker after this many small messages to one rank.
  unsigned marker_interval_ = 0;

  // -- queue, guarded by queue_mutex_ -----------------------------------------

  std::mutex queue_mutex_;
  std::vector<std::pair<outgoing_ptr, std::vector<unit>>> queued_sends_;
  std::vector<outgoing_ptr> queued_self_sends_;
  std::vector<failure> queued_losses_;
  bool started_ = false;
  bool stop_requested_ = false;
  clock::time_point stop_deadline_;

  // -- guarded by worker_mutex_ -----------------------------------------------

  mutable std::mutex worker_mutex_;
  std::deque<peer> peers_; // by rank; own one never connected
  /// The progress thread sleeps, or is about to.
  bool asleep_ = false;
  /// Since the last look, something was posted that did not complete at once.
  bool posted_open_ = false;
  size_t open_sends_ = 0;
  size_t open_receives_ = 0;
  size_t open_closes_ = 0;
  /// The rank whose loss may make this rank leave.
  std::optional<rank_id> first_lost_;
  /// Errors of peers from inside UCX callbacks, which cannot handle them.
  std::vector<std::pair<peer*, failure>> failed_;
  /// What is to be reported to the user, in order.
  std::vector<std::variant<arrival, failure>> news_;
  std::vector<outgoing_ptr> finished_;
  /// A thread is reporting news; it looks for more before it ends.
  bool telling_ = false;
  std::condition_variable told_;
  /// Memory that a lost rank may read or write if it still runs.
  std::vector<std::shared_ptr<const void>> quarantine_;
  bool closing_ = false;
  unsigned busy_ = 0;
  unsigned turns_with_failed_ = 0;

  // -- progress thread only ---------------------------------------------------

  fabric_listener* listener_ = nullptr;
  std::thread thread_;

  // -- any thread -------------------------------------------------------------

  /// Readable when something arrived and the worker was armed.
  file_descriptor events_;
  /// Ends the sleep of the progress thread.
  pollable_wake_up woken_;
  /// A parked thread polls `events_`.
  std::atomic<bool> polled_ = false;
  std::atomic<uint64_t> polls_ended_ = 0;
  /// The progress thread sleeps until the poller wakes it.
  std::atomic<bool> must_hand_over_ = false;
  std::atomic<bool> wake_posted_ = false;
  std::atomic<uint64_t> next_number_ = 0;
  std::atomic<uint64_t> messages_sent_ = 0;
  std::atomic<uint64_t> bytes_sent_ = 0;
  std::atomic<uint64_t> messages_received_ = 0;
  std::atomic<uint64_t> bytes_received_ = 0;
  std::atomic<uint64_t> messages_refused_ = 0;
};

template <class F>
void ucx_fabric::engine::guarded(peer& from, F f) noexcept {
  try {
    try {
      f();
    } catch (const error& e) {
      refuse(from, e.code(), std::string{"sent a "} + e.what());
    }
  } catch (const std::bad_alloc&) {
    from.starved = true;
  }
}

} // namespace smp
