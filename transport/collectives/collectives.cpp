#include "transport/collectives/collectives.hpp"

#include "transport/collectives/operation.hpp"
#include "transport/collectives/plan.hpp"
#include "transport/collectives/sent_ahead.hpp"
#include "transport/collectives/work_line.hpp"

#include <algorithm>
#include <atomic>
#include <deque>
#include <exception>
#include <map>
#include <new>
#include <tuple>
#include <utility>

namespace smp {

namespace {

/// Work that takes no longer than a message is done where the message arrives:
/// up to so many bytes to add up, and so many to copy.
constexpr uint64_t small_sum = 32 << 10;
constexpr uint64_t small_move = 64 << 10;

/// Touched memory is kept for the next collective.
constexpr uint64_t kept_memory = 64 << 20;

/// Bounds what is kept of each rank that is ahead. Such a rank may send half of
/// that (`sent_ahead`), but counts anew when a step is over, which may be later
/// here.
constexpr uint64_t early_factor = 2;

/// How many completed calls are remembered, to check late messages against
/// their signatures.
constexpr size_t known_ends = 16;

/// @returns whether arriving data only has to be copied.
bool is_move(collective_kind x) {
  using enum collective_kind;
  return x == allgather || x == all_to_all || x == broadcast || x == scatter
         || x == gather;
}

uint64_t position_of(const collective_label& x, rank_id member) {
  auto i = std::lower_bound(x.group.begin(), x.group.end(), member);
  return static_cast<uint64_t>(i - x.group.begin());
}

} // namespace

class collectives::impl : public std::enable_shared_from_this<impl> {
public:
  impl(fabric& x, collective_limits limits, std::shared_ptr<device_ops> devices,
       flight_record* record)
    : fabric_(x),
      limits_(limits),
      devices_(std::move(devices)),
      record_(record),
      ahead_(message_amount{limits.ahead_messages, limits.ahead}) {
    // nop
  }

  // All of these run on the line.

  void begin(const std::shared_ptr<collective_operation>& op);
  void take(rank_id from, collective_message x);
  void sent(const std::weak_ptr<collective_operation>& x, const failure& why);
  void worked(uint64_t number);
  void fail(rank_id peer, const failure& x);
  void fail_step(step_id step, const failure& why);
  void end_step(step_id step);
  void cancel();
  std::vector<begun_collective> begun(step_id step) const;
  failure untold() const;

  std::shared_ptr<collective_operation> make(collective_call x);

  void place(std::vector<uint64_t> machine_of_rank) {
    machine_of_rank_ = std::move(machine_of_rank);
  }

  /// Any thread.
  bool has_devices() const noexcept {
    return devices_ != nullptr;
  }

  /// Any thread.
  bool busy() const noexcept {
    return line_.busy() || at_work_ > 0;
  }

  /// Any thread. The line runs its tasks one after the other.
  work_line& line() noexcept {
    return line_;
  }

  rank_id self() const {
    return fabric_.self();
  }

private:
  using operation_ptr = std::shared_ptr<collective_operation>;

  /// What a device has begun; keeps the memory that it reads and writes.
  struct device_work {
    operation_ptr of;
    std::shared_ptr<device_event> done;
    std::vector<tensor_ref> read;
  };

  struct early_message {
    rank_id from;
    collective_message content;
  };

  /// Calls that differ only in their number.
  struct sequence {
    uint64_t next = 0;
    std::string place; // of the first call
    std::deque<std::pair<uint64_t, collective_signature>> ended;
    /// Found when the call was over here: the next call fails.
    failure broken;
  };

  sequence& sequence_of(collective_label x) {
    x.number = 0;
    return sequences_[std::move(x)];
  }

  /// @returns whether the call began here, and perhaps ended.
  bool is_begun(collective_label x) const {
    auto number = std::exchange(x.number, 0);
    auto i = sequences_.find(x);
    return i != sequences_.end() && number < i->second.next;
  }

  void take_running(rank_id from, const operation_ptr& op,
                    const collective_message& x);
  void take_late(const collective_message& x, rank_id from);
  void await(device_work x);
  void keep(rank_id from, collective_message x);
  std::vector<early_message> take_early(const collective_label& x);
  void disagree(const operation_ptr& op, const failure& why);
  void tell_failed(const collective_label& label,
                   const collective_writer& writer, const failure& why);
  void end_if_complete(const operation_ptr& op);
  void end(const operation_ptr& op, const failure& why);
  void note(flight_kind kind, const operation_ptr& op) const;
  /// Fails the running calls that `f` selects.
  template <class Predicate>
  void fail_running(const failure& why, Predicate f);

  fabric& fabric_;
  const collective_limits limits_;
  const std::shared_ptr<device_ops> devices_; // null: none
  flight_record* const record_;               // null: none
  std::vector<uint64_t> machine_of_rank_;
  block_pool pool_{kept_memory};
  sent_ahead ahead_;
  std::map<collective_label, sequence> sequences_;
  std::map<collective_label, operation_ptr> running_;
  std::map<uint64_t, device_work> device_work_;
  uint64_t next_work_ = 0;
  std::atomic<size_t>
    at_work_ = 0; // of `device_work_`, and still to be handled
  std::map<collective_label, std::vector<early_message>> early_;
  std::map<rank_id, message_amount> early_of_;
  std::map<rank_id, failure> lost_;
  std::map<step_id, failure> failed_steps_;
  step_id last_over_;
  /// Last member, because its tasks use all of the above.
  work_line line_;
};

// -- any thread ---------------------------------------------------------------

std::shared_ptr<collective_operation>
collectives::impl::make(collective_call x) {
  auto index = position_of(x.label, self());
  auto plan = make_plan(x, index, limits_,
                        places_of(x.label.group, machine_of_rank_));
  auto slot = std::make_shared<std::weak_ptr<collective_operation>>();
  auto sent = [weak = weak_from_this(), slot](const failure& why) {
    if (auto self = weak.lock())
      self->line().add(
        [self = self.get(), slot, why] { self->sent(*slot, why); }, false);
  };
  auto send = [this](rank_id to, message y, fabric::sent_callback done) {
    fabric_.send(to, std::move(y), std::move(done));
  };
  auto begun = [this, slot](std::shared_ptr<device_event> done,
                            std::vector<tensor_ref> read) {
    await({slot->lock(), std::move(done), std::move(read)});
  };
  auto result = std::make_shared<collective_operation>(
    std::move(x), index, std::move(plan),
    collective_operation::surroundings{limits_.unasked, ahead_, pool_,
                                       devices_.get()},
    collective_operation::callbacks{std::move(send), std::move(sent),
                                    std::move(begun)});
  *slot = result;
  return result;
}

// -- on the line --------------------------------------------------------------

void collectives::impl::begin(const operation_ptr& op) {
  auto& s = sequence_of(op->call().label);
  if (s.next == 0)
    s.place = op->call().place;
  auto& label = op->set_number(s.next++);
  auto early = take_early(label);
  running_.emplace(label, op);
  note(flight_kind::collective_begins, op);
  if (s.broken)
    return disagree(op, std::exchange(s.broken, {}));
  for (auto rank : label.group)
    if (auto i = lost_.find(rank); i != lost_.end())
      return end(op, i->second);
  if (auto i = failed_steps_.find(label.step); i != failed_steps_.end())
    return end(op, i->second);
  try {
    op->begin();
  } catch (const std::exception& e) {
    return disagree(op, {error_code::transport,
                         self(),
                         {},
                         op->call().describe() + ": " + e.what()});
  }
  end_if_complete(op);
  for (auto& x : early)
    take(x.from, std::move(x.content));
}

auto collectives::impl::take_early(const collective_label& x)
  -> std::vector<early_message> {
  auto i = early_.find(x);
  if (i == early_.end())
    return {};
  auto result = std::move(i->second);
  early_.erase(i);
  for (auto& y : result)
    early_of_[y.from] -= {1, y.content.bytes.nbytes};
  return result;
}

void collectives::impl::take(rank_id from, collective_message x) {
  try {
    if (auto i = running_.find(x.label); i != running_.end())
      take_running(from, operation_ptr{i->second}, x);
    else if (is_begun(x.label))
      take_late(x, from);
    else
      return keep(from, std::move(x));
    // For calls that are over here by now.
    ahead_.joined(x.label, from);
  } catch (const error& e) {
    fail(from, {e.code(), from, {}, e.cause().text});
  } catch (const std::exception& e) {
    fail(from, {error_code::transport,
                from,
                {},
                std::string{"a collective: "} + e.what()});
  }
}

void collectives::impl::take_running(rank_id from, const operation_ptr& op,
                                     const collective_message& x) {
  auto& call = op->call();
  auto position = position_of(call.label, from);
  if (auto y = std::get_if<failed_collective>(&x.content))
    return end(op, y->why);
  auto text = difference(call.label, x.what, position, call, op->self());
  if (!text.empty())
    return disagree(
      op, {error_code::protocol, no_rank, {}, call.describe() + ": " + text});
  op->take(position, x);
  end_if_complete(op);
}

void collectives::impl::disagree(const operation_ptr& op, const failure& why) {
  tell_failed(op->call().label, op->writer(), why);
  end(op, why);
}

void collectives::impl::tell_failed(const collective_label& label,
                                    const collective_writer& writer,
                                    const failure& why) {
  for (auto rank : label.group)
    if (rank != self())
      fabric_.send(rank, writer.failed(why));
}

/// The call is over here, which may happen to a root that only gives before
/// another rank joins. So the next call reports what is wrong with it.
void collectives::impl::take_late(const collective_message& x, rank_id from) {
  auto& s = sequence_of(x.label);
  auto i = std::find_if(s.ended.begin(), s.ended.end(),
                        [&](auto& y) { return y.first == x.label.number; });
  if (i == s.ended.end())
    return;
  if (auto y = std::get_if<failed_collective>(&x.content)) {
    s.broken = y->why;
    return;
  }
  // The numbers of rows agreed, or the call would not have completed.
  auto theirs = x.what;
  theirs.rows.clear();
  collective_call mine{
    .label = x.label, .what = i->second, .rows_taken = {}, .owner = {}};
  mine.what.rows.clear();
  auto text = difference(x.label, theirs, position_of(x.label, from), mine,
                         position_of(x.label, self()));
  if (text.empty())
    return;
  s.broken = {error_code::protocol, no_rank, {}, mine.describe() + ": " + text};
  tell_failed(x.label, collective_writer{x.label, i->second}, s.broken);
}

void collectives::impl::keep(rank_id from, collective_message x) {
  auto step = x.label.step;
  if (lost_.count(from) > 0 || (step.value > 0 && step <= last_over_)
      || std::holds_alternative<asking_collective>(x.content))
    return;
  auto& early = early_of_[from];
  early += {1, x.bytes.nbytes};
  if (early.exceeds(
        {early_factor * limits_.ahead_messages, early_factor * limits_.ahead}))
    throw error{error_code::protocol,
                "it is too far ahead in collectives: "
                  + std::to_string(early.messages) + " messages with "
                  + std::to_string(early.bytes)
                  + " bytes came for calls that rank "
                  + std::to_string(self().value) + " did not reach"};
  auto& label = x.label;
  early_[label].push_back({from, std::move(x)});
}

void collectives::impl::sent(const std::weak_ptr<collective_operation>& x,
                             const failure& why) {
  auto op = x.lock();
  if (!op || op->done()->done())
    return;
  op->sent_one();
  if (op->on_device() && why.code == error_code::transport)
    // The others wait for what this rank's device did not give.
    return disagree(
      op, {why.code, self(), {}, op->call().describe() + ": " + why.text});
  if (why)
    return end(op, why);
  end_if_complete(op);
}

void collectives::impl::await(device_work x) {
  auto number = next_work_++;
  auto done = x.done;
  device_work_.emplace(number, std::move(x));
  ++at_work_;
  // Never goes on here, which is a thread of the device.
  done->then([weak = weak_from_this(), number] {
    if (auto self = weak.lock())
      self->line().add([self = self.get(), number] { self->worked(number); },
                       true);
  });
}

void collectives::impl::worked(uint64_t number) {
  auto work = std::move(device_work_.extract(number).mapped());
  --at_work_;
  work.of->worked_once(*work.done);
  end_if_complete(work.of);
}

void collectives::impl::end_if_complete(const operation_ptr& op) {
  if (op->done()->done())
    return;
  if (auto why = op->broken())
    return disagree(op, why);
  if (op->complete())
    end(op, {});
}

void collectives::impl::end(const operation_ptr& op, const failure& why) {
  running_.erase(op->call().label);
  note(flight_kind::collective_ends, op);
  op->leave(!why);
  if (why)
    return op->done()->fail(why);
  auto key = op->call().label;
  key.number = 0;
  if (auto i = sequences_.find(key); i != sequences_.end()) {
    auto& ended = i->second.ended;
    ended.emplace_back(op->call().label.number, op->call().what);
    if (ended.size() > known_ends)
      ended.pop_front();
  }
  op->done()->set();
}

void collectives::impl::note(flight_kind kind, const operation_ptr& op) const {
  if (record_ == nullptr)
    return;
  auto& call = op->call();
  flight_event x;
  x.kind = kind;
  x.number = call.label.number;
  x.step = static_cast<uint32_t>(call.label.step.value);
  x.microbatch = static_cast<uint32_t>(call.label.microbatch.value);
  x.what = call.label.what;
  x.name = record_->name(std::string{to_string(call.what.kind)} + ' '
                         + call.label.name);
  x.amount = call.what.count() * size_of(call.what.type);
  record_->note(x);
}

template <class Predicate>
void collectives::impl::fail_running(const failure& why, Predicate f) {
  std::vector<operation_ptr> failed;
  for (auto& [label, op] : running_)
    if (f(label))
      failed.push_back(op);
  for (auto& op : failed)
    // To a rank whose device has failed it looks as if others had.
    if (auto mine = op->look_at_device())
      disagree(op, mine);
    else
      end(op, why);
}

void collectives::impl::fail(rank_id peer, const failure& x) {
  fail_running(lost_.emplace(peer, x).first->second, [peer](auto& label) {
    return std::binary_search(label.group.begin(), label.group.end(), peer);
  });
}

void collectives::impl::fail_step(step_id step, const failure& why) {
  fail_running(failed_steps_.emplace(step, why).first->second,
               [step](auto& label) { return label.step == step; });
}

void collectives::impl::end_step(step_id step) {
  last_over_ = std::max(last_over_, step);
  auto is_over = [this](auto& x) {
    return x.first.step.value > 0 && x.first.step <= last_over_;
  };
  // The calls of the last step can still be queried.
  std::erase_if(sequences_, [&](auto& x) {
    return is_over(x) && x.first.step < last_over_;
  });
  for (auto i = early_.begin(); i != early_.end();) {
    auto& x = *i++;
    if (is_over(x))
      take_early(collective_label{x.first});
  }
  ahead_.step_over(last_over_);
  failed_steps_.erase(failed_steps_.begin(),
                      failed_steps_.upper_bound(last_over_));
}

std::vector<begun_collective> collectives::impl::begun(step_id step) const {
  std::vector<begun_collective> result;
  for (auto& [label, calls] : sequences_)
    for (uint64_t i = 0; label.step == step && i < calls.next; ++i) {
      auto& x = result.emplace_back();
      x.label = label;
      x.label.number = i;
      x.place = calls.place;
      if (auto op = running_.find(x.label); op != running_.end()) {
        x.runs = true;
        x.absent = op->second->absent();
      }
    }
  return result;
}

failure collectives::impl::untold() const {
  for (auto& [label, calls] : sequences_)
    if (calls.broken && label.step.value == 0)
      return calls.broken;
  return {};
}

void collectives::impl::cancel() {
  fail_running({error_code::cancelled, self(), {}, "the session ends"},
               [](auto&) { return true; });
}

// -- public -------------------------------------------------------------------

collectives::collectives(fabric& x, collective_limits limits,
                         std::shared_ptr<device_ops> devices,
                         flight_record* record)
  : impl_(std::make_shared<impl>(x, limits, std::move(devices), record)) {
  // nop
}

collectives::~collectives() {
  impl_->line().add([x = impl_.get()] { x->cancel(); }, false);
  impl_->line().close();
}

void collectives::place(std::vector<uint64_t> machine_of_rank) {
  impl_->place(std::move(machine_of_rank));
}

started_collective collectives::start(collective_call x) {
  // A barrier transfers no data.
  if (x.what.kind == collective_kind::barrier)
    x.what = {.kind = collective_kind::barrier, .shape = {0}, .rows = {}};
  x.what.on_device = x.device != device_ref{};
  x.check(impl_->self());
  if (x.what.on_device && !impl_->has_devices())
    throw error{error_code::unsupported,
                x.describe() + ": this rank has no device"};
  auto op = impl_->make(std::move(x));
  auto weak = std::weak_ptr<collective_operation>{op};
  auto& label = op->call().label;
  wait_reason why{.what = op->call().describe(),
                  .from = {},
                  .subject = {.what = wait_subject::kind::collective,
                              .name = label.name,
                              .group = label.group}};
  started_collective result{op->done(), why};
  result.why.now = [weak, why = std::move(why)] {
    auto now = why;
    if (auto y = weak.lock())
      std::tie(now.what, now.from) = y->missing();
    return now;
  };
  impl_->line().add([x = impl_.get(), op] { x->begin(op); }, false);
  return result;
}

bool collectives::busy() const {
  return impl_->busy();
}

std::vector<begun_collective> collectives::begun(step_id step) const {
  auto result = std::make_shared<awaited<std::vector<begun_collective>>>();
  impl_->line().add(
    [x = impl_.get(), step, result] { result->set_value(x->begun(step)); },
    false);
  if (!result->done())
    return {};
  return awaited<std::vector<begun_collective>>::get(result, {});
}

failure collectives::untold() const {
  auto result = std::make_shared<awaited<failure>>();
  impl_->line().add(
    [x = impl_.get(), result] { result->set_value(x->untold()); }, false);
  return awaited<failure>::get(result, {"collectives to end", {}});
}

void collectives::deliver(rank_id from, message x) {
  collective_message read;
  try {
    read = read_collective(x, from, impl_->self());
  } catch (const error& e) {
    fail(from, {error_code::protocol, from, {}, e.cause().text});
    return;
  }
  auto limit = is_move(read.what.kind) ? small_move : small_sum;
  // A launch may wait, on a device that has much to do.
  auto large = read.bytes.nbytes > limit || read.bytes.device != device_ref{};
  auto take = [y = impl_.get(), from, read = std::move(read)]() mutable {
    y->take(from, std::move(read));
  };
  impl_->line().add(std::move(take), large);
}

void collectives::step_failed(step_id step, const failure& why) {
  impl_->line().add([x = impl_.get(), step, why] { x->fail_step(step, why); },
                    false);
}

void collectives::step_over(step_id step) {
  impl_->line().add([x = impl_.get(), step] { x->end_step(step); }, false);
}

void collectives::fail(rank_id peer, const failure& x) {
  impl_->line().add([y = impl_.get(), peer, x] { y->fail(peer, x); }, false);
}

} // namespace smp
