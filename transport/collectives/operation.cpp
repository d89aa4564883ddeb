#include "transport/collectives/operation.hpp"

#include <algorithm>
#include <cstring>
#include <new>

namespace smp {

namespace {

/// The error of an earlier launch shows at any later one.
constexpr auto failed_device
  = "the device of this rank has failed, before or in a sum "
    "(smp.wait_for_device = true names the module)";

[[noreturn]] void refuse(const collective_call& x, const std::string& why) {
  throw error{error_code::protocol, x.describe() + ": " + why};
}

/// Moves may have the same memory as input and output.
void copy(std::byte* to, const void* from, uint64_t size) {
  if (size > 0 && to != from)
    std::memcpy(to, from, size);
}

const std::byte* bytes_at(const void* x, uint64_t offset) {
  return static_cast<const std::byte*>(x) + offset;
}

} // namespace

collective_operation::collective_operation(collective_call x, uint64_t self,
                                           collective_plan plan,
                                           const surroundings& around,
                                           callbacks tell)
  : call_(std::move(x)),
    self_(self),
    plan_(std::move(plan)),
    around_(around),
    tell_(std::move(tell)),
    unasked_(call_.label.group.size()),
    told_(call_.label.group.size()),
    to_tell_(call_.label.group.size()),
    heard_(call_.label.group.size()),
    owed_(call_.label.group.size()) {
  for (auto& piece : plan_.pieces)
    prepare(piece);
  count_neighbours();
}

void collective_operation::prepare(const collective_plan::piece& x) {
  running_piece result;
  result.plan = x;
  if (x.apart) {
    auto block = take_memory(x.range.size);
    result.memory = block.get();
    result.owner = std::move(block);
  } else {
    result.memory = static_cast<std::byte*>(call_.output) + x.range.begin;
    result.owner = call_.owner;
  }
  // An empty piece is still waited for.
  auto count = std::max<uint64_t>(
    (x.range.size + plan_.segment - 1) / plan_.segment, 1);
  result.left = count;
  result.segments.resize(count);
  for (auto& s : result.segments) {
    s.given.resize(x.sources.size());
    for (auto from : x.sources)
      s.missing += from != self_;
  }
  for (auto from : x.sources)
    if (from != self_)
      owed_[from] += count;
  ++pieces_left_;
  pieces_.emplace(x.id, std::move(result));
}

std::shared_ptr<std::byte> collective_operation::take_memory(uint64_t size) {
  if (!on_device())
    return around_.pool.take(size);
  try {
    return around_.devices->allocate_sum(size);
  } catch (const std::bad_alloc&) {
    throw error{error_code::transport,
                call_.describe() + ": out of memory on the device, which has "
                  + "no " + std::to_string(size) + " bytes for sums"};
  }
}

void collective_operation::count_neighbours() {
  for (auto& x : plan_.sends)
    to_tell_[x.to] = true;
  for (auto& x : plan_.pieces) {
    for (auto from : x.sources)
      to_tell_[from] = true;
    for (auto to : x.forward)
      to_tell_[to] = true;
  }
  // A rank with a different signature must hear of this call, and a root that
  // only takes would send nothing.
  if (is_told_by_all())
    to_tell_.assign(to_tell_.size(), true);
  to_tell_[self_] = false;
}

/// @returns whether completion implies that all ranks have joined, even those
/// that announce that to other ranks only.
bool collective_operation::is_told_by_all() const noexcept {
  using enum collective_kind;
  auto kind = call_.what.kind;
  return (kind == reduce || kind == gather) && call_.what.root == self_;
}

const collective_label& collective_operation::set_number(uint64_t x) {
  call_.label.number = x;
  writer_.emplace(call_.label, call_.what);
  return call_.label;
}

// -- sending ------------------------------------------------------------------

void collective_operation::begin() {
  send_input();
  for (uint64_t to = 0; to < to_tell_.size(); ++to)
    if (to_tell_[to] && !told_[to])
      say_joined(to);
  // Messages that arrive meanwhile wait in line, so the pieces stay.
  for (auto& [id, piece] : pieces_)
    for (size_t i = 0; i < piece.segments.size(); ++i)
      if (piece.segments[i].missing == 0)
        finish(piece, i);
}

void collective_operation::send_input() {
  // On a device every send is awaited, as it may fail there. Its copies to the
  // host or the arena may come after the sum, so what that overwrites is copied
  // as well.
  auto copies = plan_.send_copies
                && (!on_device() || call_.input == call_.output);
  for (auto& x : plan_.sends) {
    auto bytes = copies ? copy_of_input(x.range)
                        : view(bytes_at(call_.input, x.range.begin),
                               x.range.size, call_.owner, call_.ready);
    if (broken_)
      return;
    send_segments(x.to, x.piece, std::move(bytes), 0, !copies || on_device());
  }
}

tensor_ref collective_operation::copy_of_input(byte_range range) {
  auto from = bytes_at(call_.input, range.begin);
  auto block = take_memory(range.size);
  std::shared_ptr<device_event> done;
  if (!on_device())
    copy(block.get(), from, range.size);
  else if (range.size > 0)
    done = put({.count = range.size}, block.get(), {from});
  if (done)
    tell_.begun(done, {});
  return view(block.get(), range.size, block, done);
}

void collective_operation::send_segments(uint64_t to, uint32_t piece,
                                         tensor_ref bytes, uint64_t offset,
                                         bool counted) {
  uint64_t begin = 0;
  do {
    auto size = std::min(plan_.segment, bytes.nbytes - begin);
    auto part = view(bytes_at(bytes.data, begin), size, bytes.owner,
                     bytes.ready);
    give(to, writer_->segment({piece, offset + begin}, std::move(part)),
         counted);
    begin += size;
  } while (begin < bytes.nbytes);
}

void collective_operation::give(uint64_t to, message x, bool counted) {
  if (!may_send(to, tensor_bytes(x.body))) {
    kept_.push_back({to, std::move(x), counted});
    return;
  }
  told_[to] = true;
  if (counted)
    ++open_sends_;
  tell_.send(call_.label.group[to], std::move(x),
             counted ? tell_.sent : std::function<void(const failure&)>{});
}

bool collective_operation::may_send(uint64_t to, uint64_t bytes) {
  if (heard_[to])
    return true;
  auto& sent = unasked_[to];
  if (sent.bytes + bytes > around_.unasked
      || !around_.ahead.add(call_.label.group[to], bytes))
    return false;
  sent += {1, bytes};
  return true;
}

/// Two ranks that may not leave anything more with each other must still meet,
/// so a rank always announces itself; the one that joins second gets an answer.
void collective_operation::say_joined(uint64_t to) {
  told_[to] = may_send(to, 0);
  tell_.send(call_.label.group[to],
             told_[to] ? writer_->joined() : writer_->asking(), {});
}

void collective_operation::sent_one() {
  --open_sends_;
}

void collective_operation::worked_once(const device_event& done) {
  --open_work_;
  if (done.failed())
    break_off(failed_device);
}

void collective_operation::leave(bool well) {
  for (uint64_t to = 0; to < unasked_.size(); ++to) {
    if (heard_[to] || unasked_[to].messages == 0)
      continue;
    auto rank = call_.label.group[to];
    if (well && is_told_by_all())
      around_.ahead.remove(rank, unasked_[to]);
    else
      around_.ahead.leave(call_.label, rank, unasked_[to]);
  }
}

// -- what arrives -------------------------------------------------------------

void collective_operation::take(uint64_t from, const collective_message& x) {
  joined(from);
  if (auto where = std::get_if<piece_segment>(&x.content))
    take_segment(from, *where, x.bytes);
}

void collective_operation::joined(uint64_t from) {
  if (heard_[from].exchange(true))
    return;
  around_.ahead.remove(call_.label.group[from], unasked_[from]);
  std::vector<kept_send> kept;
  kept.swap(kept_);
  for (auto& x : kept) {
    if (x.to == from)
      give(x.to, std::move(x.content), x.counted);
    else
      kept_.push_back(std::move(x));
  }
  if (to_tell_[from] && !told_[from])
    say_joined(from);
}

void collective_operation::take_segment(uint64_t from,
                                        const piece_segment& where,
                                        const tensor_ref& bytes) {
  auto i = pieces_.find(where.piece);
  auto rank = "rank " + std::to_string(call_.label.group[from].value);
  if (i == pieces_.end())
    refuse(call_, rank + " sent a piece that does not exist");
  auto& piece = i->second;
  auto& sources = piece.plan.sources;
  auto source = std::find(sources.begin(), sources.end(), from);
  auto index = where.offset / plan_.segment;
  if (source == sources.end() || where.offset % plan_.segment != 0
      || index >= piece.segments.size()
      || bytes.nbytes != range_of(piece, index).size)
    refuse(call_, rank + " sent a segment that does not exist");
  auto& s = piece.segments[index];
  auto nth = static_cast<size_t>(source - sources.begin());
  if (s.missing == 0 || s.given[nth].owner || s.given[nth].data != nullptr)
    refuse(call_, rank + " sent a segment twice");
  if (bytes.nbytes > 0 && bytes.device != call_.device) {
    if (bytes.home == device_ref{})
      refuse(call_, rank + " sent a segment that is not on a device");
    if (look_at_device())
      return;
    return break_off("out of memory on the device, which has no "
                     + std::to_string(bytes.nbytes) + " bytes for what " + rank
                     + " sent");
  }
  s.given[nth] = bytes;
  // An empty segment may have no memory, but it has arrived.
  if (bytes.data == nullptr)
    s.given[nth].data = this;
  --owed_[from];
  if (--s.missing == 0)
    finish(piece, index);
}

byte_range collective_operation::range_of(const running_piece& x,
                                          size_t index) const {
  auto begin = index * plan_.segment;
  return {begin, std::min(plan_.segment, x.plan.range.size - begin)};
}

void collective_operation::finish(running_piece& x, size_t index) {
  auto& s = x.segments[index];
  auto range = range_of(x, index);
  auto done = add_up(x, s, range);
  if (broken_)
    return;
  auto result = view(x.memory + range.begin, range.size, x.owner,
                     done ? done : call_.ready);
  auto is_copy = x.plan.sources.size() == 1 && x.plan.sources[0] != self_;
  if (is_copy)
    result = view(s.given[0].data, range.size, s.given[0].owner);
  // Sends from the user's memory must complete before that may change.
  auto counted = (!is_copy && !x.plan.apart) || on_device();
  for (auto to : x.plan.forward)
    send_segments(to, x.plan.forward_as, result, range.begin, counted);
  if (done)
    tell_.begun(std::move(done), std::move(s.given));
  s.given.clear();
  if (--x.left == 0)
    --pieces_left_;
}

/// @returns when it is done; null: it is
std::shared_ptr<device_event> collective_operation::add_up(running_piece& x,
                                                           const segment& s,
                                                           byte_range range) {
  auto to = x.memory + range.begin;
  auto own = bytes_at(call_.input, x.plan.own + range.begin);
  std::vector<const void*> inputs;
  for (size_t i = 0; i < s.given.size(); ++i)
    inputs.push_back(x.plan.sources[i] == self_ ? own : s.given[i].data);
  if (inputs.size() == 1 && !on_device()) {
    copy(to, inputs[0], range.size);
    return nullptr;
  }
  if (range.size == 0 || (inputs.size() == 1 && to == inputs[0]))
    return nullptr;
  if (inputs.size() == 1)
    return put({.count = range.size}, to, inputs);
  std::optional<uint64_t> divisor;
  if (call_.what.op == reduce_op::mean && x.plan.last_sum)
    divisor = call_.label.group.size();
  auto [type, op] = std::pair{call_.what.type, call_.what.op};
  auto count = range.size / size_of(type);
  if (on_device())
    return put({type, op, count, divisor}, to, inputs);
  combine(type, op, to, inputs, count, divisor);
  return nullptr;
}

/// On the device. Whoever sent something is not to blame if that fails.
std::shared_ptr<device_event>
collective_operation::put(const combination& x, std::byte* to,
                          const std::vector<const void*>& inputs) try {
  auto result = around_.devices->combine(x, to, inputs, call_.ready);
  ++open_work_;
  return result;
} catch (const std::bad_alloc&) {
  break_off("out of memory on the device, for a sum");
  return nullptr;
} catch (const error& e) {
  break_off(e.cause().text);
  return nullptr;
}

failure collective_operation::look_at_device() {
  if (call_.ready && call_.ready->failed())
    break_off(failed_device);
  return broken_;
}

void collective_operation::break_off(const std::string& why) {
  if (!broken_)
    broken_ = {error_code::transport,
               call_.label.group[self_],
               {},
               call_.describe() + ": " + why};
}

tensor_ref
collective_operation::view(const void* data, uint64_t size,
                           std::shared_ptr<const void> owner,
                           std::shared_ptr<device_event> ready) const {
  tensor_ref result;
  if (size > 0) {
    result.device = call_.device;
    result.ready = std::move(ready);
  }
  result.data = data;
  result.nbytes = size;
  result.shape = {static_cast<int64_t>(size)};
  result.owner = std::move(owner);
  return result;
}

// -- any thread ---------------------------------------------------------------

std::vector<rank_id> collective_operation::absent() const {
  std::vector<rank_id> result;
  for (size_t i = 0; i < heard_.size(); ++i)
    if (to_tell_[i] && !heard_[i])
      result.push_back(call_.label.group[i]);
  return result;
}

std::pair<std::string, std::optional<rank_id>>
collective_operation::missing() const {
  auto text_of = [](const std::vector<rank_id>& xs) {
    std::string result;
    for (auto x : xs)
      result += (result.empty() ? "rank " : ", rank ")
                + std::to_string(x.value);
    return result;
  };
  auto text = call_.describe();
  if (!call_.place.empty())
    text += " in " + call_.place;
  if (auto xs = absent(); !xs.empty())
    return {text + " (not joined by " + text_of(xs) + ')', xs.front()};
  std::vector<rank_id> owing;
  for (size_t i = 0; i < owed_.size(); ++i)
    if (owed_[i] > 0)
      owing.push_back(call_.label.group[i]);
  if (!owing.empty())
    return {text + " (to come of " + text_of(owing) + ')', owing.front()};
  if (open_work_ > 0)
    text += " (to be finished by the device)";
  return {text, std::nullopt};
}

} // namespace smp
