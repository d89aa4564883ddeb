#include "transport/ucx/engine.hpp"

#include "transport/refuse_waits.hpp"

#include <poll.h>
#include <pthread.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <memory>

namespace smp {

using namespace ucx;

namespace {

/// Calls of UCX before others get their turn: a stream of large messages always
/// has more.
constexpr unsigned progress_limit = 32;

/// A connection that cannot send because the other side is slow keeps the
/// worker from being armed: after so many tries the thread pauses for a while.
/// Costs 6 % of a core where retrying costs all of it.
constexpr unsigned busy_limit = 32;
constexpr std::chrono::microseconds busy_pause{500};

/// How long arrivals may wait while a poller computes. If it parks again
/// before, no thread has to change: a call takes a fifth less.
constexpr std::chrono::microseconds poll_tick{400};

/// Guards against a lost wake-up: while something is in flight, and
/// otherwise.
constexpr std::chrono::milliseconds open_guard{10};
constexpr std::chrono::milliseconds idle_guard{100};

/// Turns after which an error is handled although more keeps arriving.
constexpr unsigned failed_patience = 64;

/// Slots of a queue in shared memory that the small messages of all ranks
/// together may take; there are 256, and a rendezvous takes one as well.
constexpr uint64_t small_slots = 128;

/// Small messages to one rank that are not known to have been taken out: at
/// most `marker_window` = 2 times this.
unsigned marker_interval_for(uint64_t world_size) {
  auto others = std::max<uint64_t>(world_size, 2) - 1;
  return static_cast<unsigned>(
    std::clamp<uint64_t>(small_slots / 2 / others, 4, 32));
}

/// Size of a message (header and data) that is sent by copies. Shared memory
/// moves 8 KB per slot and has a cheap rendezvous; tcp in event mode pays for a
/// rendezvous with four wake-ups.
uint64_t eager_limit_for(const std::string& transports) {
  auto shared = transports.find("posix") != std::string::npos
                || transports.find("sysv") != std::string::npos;
  return shared ? 8192 : 256 * 1024;
}

timespec to_timespec(std::chrono::microseconds x) {
  auto seconds = std::chrono::floor<std::chrono::seconds>(x);
  return {seconds.count(), std::chrono::nanoseconds{x - seconds}.count()};
}

} // namespace

// -- construction -------------------------------------------------------------

ucx_fabric::engine::engine(rank_id self, uint64_t world_size,
                           ucx_options options)
  : self_(self),
    options_(std::move(options)),
    pool_(options_.pool_limit),
    marker_interval_(marker_interval_for(world_size)) {
  if (self.value >= world_size || world_size > UINT32_MAX)
    throw error{error_code::internal, "rank " + std::to_string(self.value)
                                        + " of a world of "
                                        + std::to_string(world_size)};
  worker_.emplace(options_);
  address_ = worker_->address();
  max_header_ = worker_->max_header();
  peers_.resize(world_size);
  for (uint64_t i = 0; i < world_size; ++i) {
    peers_[i].self = this;
    peers_[i].rank = rank_id{i};
  }
  events_.reset(::dup(worker_->event_fd()));
  // Before any rank knows the address: UCX drops what it has no handler for.
  ucp_am_handler_param_t handler{};
  handler.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID
                       | UCP_AM_HANDLER_PARAM_FIELD_CB
                       | UCP_AM_HANDLER_PARAM_FIELD_ARG
                       | UCP_AM_HANDLER_PARAM_FIELD_FLAGS;
  handler.id = active_message_id;
  handler.cb = on_active_message;
  handler.arg = this;
  handler.flags = UCP_AM_FLAG_WHOLE_MSG;
  check(ucp_worker_set_am_recv_handler(worker_->get(), &handler),
        "UCX takes no handler");
}

ucx_fabric::engine::~engine() {
  stop(std::chrono::milliseconds{0});
}

void ucx_fabric::engine::register_memory(std::shared_ptr<std::byte> x,
                                         uint64_t size) {
  worker_lock lock{worker_mutex_};
  worker_->register_memory(std::move(x), size);
}

void ucx_fabric::engine::start(const std::vector<std::string>& addresses,
                               fabric_listener& listener) {
  worker_lock lock{worker_mutex_};
  if (addresses.size() != peers_.size())
    throw error{error_code::transport,
                std::to_string(addresses.size()) + " addresses for "
                  + std::to_string(peers_.size()) + " ranks"};
  for (auto& x : peers_)
    if (x.rank != self_)
      connect(x, addresses[x.rank.value]);
  listener_ = &listener;
  {
    std::lock_guard guard{queue_mutex_};
    started_ = true;
  }
  thread_ = std::thread{[this] { run(); }};
}

void ucx_fabric::engine::connect(peer& to, const std::string& address) {
  ucp_ep_params_t params{};
  params.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS
                      | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE
                      | UCP_EP_PARAM_FIELD_ERR_HANDLER;
  params.address = reinterpret_cast<const ucp_address_t*>(address.data());
  params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
  params.err_handler.cb = on_endpoint_error;
  params.err_handler.arg = &to;
  check(ucp_ep_create(worker_->get(), &params, &to.endpoint),
        "rank " + std::to_string(self_.value) + " cannot reach rank "
          + std::to_string(to.rank.value) + " by " + options_.transports
          + (options_.trusted_network
               ? ""
               : " on this machine; where ranks share no memory, "
                 "UCX_TLS=tcp,self in the environment of all makes them talk "
                 "by tcp"));
  to.transports = transports_of(to.endpoint);
  to.eager_limit = eager_limit_for(to.transports);
}

void ucx_fabric::engine::stop(std::chrono::milliseconds limit) {
  {
    std::lock_guard guard{queue_mutex_};
    if (stop_requested_)
      return;
    stop_requested_ = true;
    stop_deadline_ = clock::now() + limit;
  }
  if (thread_.joinable()) {
    wake();
    thread_.join();
    return;
  }
  worker_lock lock{worker_mutex_};
  for (auto& x : peers_)
    close(x);
  worker_.reset();
}

void ucx_fabric::engine::peer_lost(const failure& x) {
  if (x.rank.value >= peers_.size() || x.rank == self_)
    return;
  {
    std::lock_guard guard{queue_mutex_};
    queued_losses_.push_back(x);
  }
  wake();
}

fabric_stats ucx_fabric::engine::stats() const {
  return {messages_sent_, bytes_sent_, messages_received_, bytes_received_,
          messages_refused_};
}

std::string ucx_fabric::engine::transports_to(rank_id x) const {
  worker_lock lock{worker_mutex_};
  return peers_.at(x.value).transports;
}

// -- progress thread ----------------------------------------------------------

void ucx_fabric::engine::run() {
  auto name = "smp-ucx-" + std::to_string(self_.value);
  pthread_setname_np(pthread_self(), name.substr(0, 15).c_str());
  refuse_waits("the thread that delivers messages");
  // Where all cores compute, a message otherwise waits 1.5 ms for its turn
  // instead of 30 us. Not permitted to every user; then nothing changes.
  ::setpriority(PRIO_PROCESS, static_cast<id_t>(::gettid()), -10);
  worker_lock lock{worker_mutex_};
  auto last = clock::now();
  for (;;) {
    auto active = turn(lock);
    if (stop_is_due(active))
      break;
    if (active && options_.spin.count() > 0)
      last = clock::now();
    if (!active && (polled_ || !spins(lock, last)))
      wait(lock);
  }
  close_all(lock);
}

bool ucx_fabric::engine::spins(worker_lock& lock,
                               clock::time_point since) const {
  if (options_.spin.count() == 0 || clock::now() - since >= options_.spin)
    return false;
  lock.unlock();
  std::this_thread::yield();
  lock.lock();
  return true;
}

bool ucx_fabric::engine::stop_is_due(bool active) {
  std::lock_guard guard{queue_mutex_};
  if (!stop_requested_)
    return false;
  if (clock::now() >= stop_deadline_)
    return true;
  return !active && open_sends_ == 0 && queued_sends_.empty()
         && queued_self_sends_.empty()
         && std::all_of(peers_.begin(), peers_.end(), [](auto& x) {
              return x.next_small() == nullptr && x.bulk.empty();
            });
}

bool ucx_fabric::engine::turn(worker_lock& lock) {
  take_queued_sends();
  take_queued_losses();
  unsigned count = 0;
  bool dry = false;
  while (!dry && count < progress_limit && news_.empty() && finished_.empty()) {
    dry = ucp_worker_progress(worker_->get()) == 0;
    if (!dry)
      ++count;
  }
  // Messages that a rank sent before its end come first, perhaps a goodbye.
  if (dry || ++turns_with_failed_ > failed_patience) {
    turns_with_failed_ = 0;
    handle_failed();
  }
  for (auto& x : peers_) {
    if (x.state == peer_state::connected) {
      post_ready(x);
    } else {
      drop_queued(x, x.why);
      close_in_time(x);
    }
  }
  auto told = tell(lock);
  if (count == 0 && !told)
    return false;
  busy_ = 0;
  return true;
}

void ucx_fabric::engine::take_queued_losses() {
  std::vector<failure> queued;
  {
    std::lock_guard guard{queue_mutex_};
    queued.swap(queued_losses_);
  }
  if (closing_)
    return;
  for (auto& why : queued) {
    auto& x = peers_[why.rank.value];
    // It may have left in an orderly way: the report of its loss knows better.
    if (x.state == peer_state::left)
      x.why = why;
    // If the SUPERVISOR is lost, this rank counts all others as lost; but they
    // may be alive, and need to hear whose loss makes this one leave.
    if (x.state == peer_state::connected && first_lost_)
      part_from(x, why);
    else
      lose(x, why);
    report(x);
  }
}

bool ucx_fabric::engine::tell(worker_lock& lock) {
  // One thread at a time, so that news is never reported out of order.
  if (std::exchange(telling_, true))
    return false;
  auto told = false;
  while (tell_news(lock))
    told = true;
  telling_ = false;
  told_.notify_one();
  return told;
}

bool ucx_fabric::engine::tell_news(worker_lock& lock) {
  std::vector<outgoing_ptr> to_self;
  {
    std::lock_guard guard{queue_mutex_};
    to_self.swap(queued_self_sends_);
  }
  auto news = std::exchange(news_, {});
  auto finished = std::exchange(finished_, {});
  if (closing_)
    news.clear();
  if (news.empty() && finished.empty() && to_self.empty())
    return false;
  auto closing = closing_;
  lock.unlock();
  for (auto& x : finished)
    tell_sent(*x);
  for (auto& x : to_self)
    deliver_to_self(*x, closing);
  for (auto& x : news) {
    if (auto what = std::get_if<arrival>(&x))
      listener_->on_message(what->from, std::move(what->content));
    else
      listener_->on_peer_lost(std::get<failure>(x));
  }
  lock.lock();
  return true;
}

void ucx_fabric::engine::deliver_to_self(outgoing& x, bool closing) {
  if (closing) {
    x.why = stopped();
    tell_sent(x);
    return;
  }
  // Copied like any other message: with shared bytes an operation in place
  // could change what another one saved (R37).
  auto copy = x.content;
  for (auto& t : copy.body.tensors) {
    auto block = pool_.take(t.nbytes);
    if (t.nbytes > 0)
      std::memcpy(block.get(), t.data, t.nbytes);
    t.data = block.get();
    t.owner = std::move(block);
  }
  auto bytes = copy.body.bytes.size() + tensor_bytes(copy.body);
  ++messages_sent_;
  bytes_sent_ += bytes;
  ++messages_received_;
  bytes_received_ += bytes;
  tell_sent(x);
  listener_->on_message(self_, std::move(copy));
}

void ucx_fabric::engine::wait(worker_lock& lock) {
  auto limit = open_sends_ + open_receives_ + open_closes_ > 0 ? open_guard
                                                               : idle_guard;
  auto armed = ucp_worker_arm(worker_->get()) == UCS_OK;
  if (armed)
    busy_ = 0;
  else if (++busy_ <= busy_limit)
    return;
  asleep_ = true;
  lock.unlock();
  if (!armed)
    sleep_for(busy_pause);
  else if (!has_queued() && (polled_ || (events_within(limit) && polled_)))
    wait_for_poller(limit);
  if (woken_.try_wait())
    wake_posted_ = false;
  lock.lock();
  asleep_ = false;
}

bool ucx_fabric::engine::events_within(std::chrono::microseconds limit) {
  std::array<pollfd, 2> ready{
    {{events_.get(), POLLIN, 0}, {woken_.fd(), POLLIN, 0}}};
  auto t = to_timespec(limit);
  ::ppoll(ready.data(), ready.size(), &t, nullptr);
  return ready[1].revents == 0 && ready[0].revents != 0;
}

bool ucx_fabric::engine::sleep_for(std::chrono::microseconds limit) {
  pollfd ready{woken_.fd(), POLLIN, 0};
  auto t = to_timespec(limit);
  return ::ppoll(&ready, 1, &t, nullptr) > 0;
}

void ucx_fabric::engine::wait_for_poller(std::chrono::microseconds limit) {
  // A poller that computes briefly and parks again needs no help in between.
  while (polled_) {
    auto before = polls_ended_.load();
    if (sleep_for(poll_tick))
      return;
    if (polls_ended_ != before)
      continue;
    // Either this thread sees that the poller ended, or the poller sees this.
    must_hand_over_ = true;
    if (polled_ && polls_ended_ == before)
      sleep_for(limit);
    must_hand_over_ = false;
    return;
  }
}

bool ucx_fabric::engine::has_queued() {
  std::lock_guard guard{queue_mutex_};
  return !queued_sends_.empty() || !queued_self_sends_.empty()
         || !queued_losses_.empty();
}

} // namespace smp
