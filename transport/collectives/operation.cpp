#include "transport/collectives/operation.hpp"

#include <algorithm>
#include <cstring>

namespace smp {

namespace {

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
                                           uint64_t unasked, sent_ahead& ahead,
                                           block_pool& pool, sender send,
                                           wake sent)
  : call_(std::move(x)),
    self_(self),
    plan_(std::move(plan)),
    unasked_limit_(unasked),
    ahead_(ahead),
    pool_(pool),
    send_(std::move(send)),
    sent_(std::move(sent)),
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
    auto block = pool_.take(x.range.size);
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
  for (auto& x : plan_.sends) {
    auto from = bytes_at(call_.input, x.range.begin);
    auto bytes = view(from, x.range.size, call_.owner);
    if (plan_.send_copies) {
      auto block = pool_.take(x.range.size);
      copy(block.get(), from, x.range.size);
      bytes = view(block.get(), x.range.size, block);
    }
    send_segments(x.to, x.piece, std::move(bytes), 0, !plan_.send_copies);
  }
}

void collective_operation::send_segments(uint64_t to, uint32_t piece,
                                         tensor_ref bytes, uint64_t offset,
                                         bool counted) {
  uint64_t begin = 0;
  do {
    auto size = std::min(plan_.segment, bytes.nbytes - begin);
    auto part = view(bytes_at(bytes.data, begin), size, bytes.owner);
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
  send_(call_.label.group[to], std::move(x),
        counted ? sent_ : std::function<void(const failure&)>{});
}

bool collective_operation::may_send(uint64_t to, uint64_t bytes) {
  if (heard_[to])
    return true;
  auto& sent = unasked_[to];
  if (sent.bytes + bytes > unasked_limit_
      || !ahead_.add(call_.label.group[to], bytes))
    return false;
  sent += {1, bytes};
  return true;
}

/// Two ranks that may not leave anything more with each other must still meet,
/// so a rank always announces itself; the one that joins second gets an answer.
void collective_operation::say_joined(uint64_t to) {
  told_[to] = may_send(to, 0);
  send_(call_.label.group[to],
        told_[to] ? writer_->joined() : writer_->asking(), {});
}

void collective_operation::sent_one() {
  --open_sends_;
}

void collective_operation::leave(bool well) {
  for (uint64_t to = 0; to < unasked_.size(); ++to) {
    if (heard_[to] || unasked_[to].messages == 0)
      continue;
    auto rank = call_.label.group[to];
    if (well && is_told_by_all())
      ahead_.remove(rank, unasked_[to]);
    else
      ahead_.leave(call_.label, rank, unasked_[to]);
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
  ahead_.remove(call_.label.group[from], unasked_[from]);
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
  add_up(x, s, range);
  auto result = view(x.memory + range.begin, range.size, x.owner);
  auto is_copy = x.plan.sources.size() == 1 && x.plan.sources[0] != self_;
  if (is_copy)
    result = view(s.given[0].data, range.size, s.given[0].owner);
  // Sends from the user's memory must complete before that may change.
  auto counted = !is_copy && !x.plan.apart;
  for (auto to : x.plan.forward)
    send_segments(to, x.plan.forward_as, result, range.begin, counted);
  s.given.clear();
  if (--x.left == 0)
    --pieces_left_;
}

void collective_operation::add_up(running_piece& x, segment& s,
                                  byte_range range) {
  auto to = x.memory + range.begin;
  auto own = bytes_at(call_.input, x.plan.own + range.begin);
  std::vector<const void*> inputs;
  for (size_t i = 0; i < s.given.size(); ++i)
    inputs.push_back(x.plan.sources[i] == self_ ? own : s.given[i].data);
  if (inputs.size() == 1)
    return copy(to, inputs[0], range.size);
  if (range.size == 0)
    return;
  std::optional<uint64_t> divisor;
  if (call_.what.op == reduce_op::mean && x.plan.last_sum)
    divisor = call_.label.group.size();
  combine(call_.what.type, call_.what.op, to, inputs,
          range.size / size_of(call_.what.type), divisor);
}

tensor_ref collective_operation::view(const void* data, uint64_t size,
                                      std::shared_ptr<const void> owner) const {
  tensor_ref result;
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
  return {text, std::nullopt};
}

} // namespace smp
