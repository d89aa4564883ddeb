#include "actors/order/order_book.hpp"

#include <algorithm>
#include <limits>
#include <utility>

namespace smp {

order_book::order_book(options x) : options_(x) {
  // nop
}

// -- pp_rank 0 ----------------------------------------------------------------

void order_book::set_key(uint64_t x) {
  std::lock_guard guard{mutex_};
  key_ = x;
}

order_book::proposal order_book::propose() const {
  std::lock_guard guard{mutex_};
  proposal result;
  auto* x = find(key_);
  if (x == nullptr)
    return result;
  auto source = best(*x);
  result.replays = source.has_value();
  result.source = source.value_or(step_id{});
  for (auto& [step, record] : x->records)
    result.records.push_back(step);
  if (source)
    result.order = x->order;
  return result;
}

void order_book::agree(const std::vector<proposal>& all) {
  std::lock_guard guard{mutex_};
  auto& first = all.front();
  agreed_ = agreement{};
  if (std::ranges::none_of(all, &proposal::replays))
    return;
  auto can = [&](auto& x) {
    return std::ranges::count(x.records, first.source) > 0
           // Only the chosen record has the computed order.
           && (!options_.fixed_order
               || (x.replays && x.source == first.source));
  };
  if (first.replays && std::ranges::all_of(all, can)) {
    agreed_->source = first.source;
    agreed_->same_order = first.order != 0
                          && std::ranges::all_of(all, [&](auto& x) {
                               return x.order == first.order;
                             });
  } else if (first.replays || options_.fixed_order) {
    auto& x = use(key_);
    x = forgotten(x);
  }
}

step_plan order_book::plan(step_id step) {
  std::lock_guard guard{mutex_};
  step_plan result{step, step_plan::mode::record, key_, {}};
  auto& x = use(key_);
  auto decided = std::exchange(agreed_, std::nullopt);
  auto source = decided ? decided->source : best(x);
  if (!source)
    return result;
  if (x.chosen != source)
    choose(x, *source);
  result.what = step_plan::mode::replay;
  result.source = *source;
  result.same_order = decided && decided->same_order;
  return result;
}

void order_book::took(step_id step, double seconds, bool learnt,
                      size_t warm_up) {
  std::lock_guard guard{mutex_};
  for (auto& x : entries_) {
    // A step that failed has no record.
    if (x.chosen || !x.records.contains(step) || x.seconds.contains(step))
      continue;
    auto worse = learnt || x.count <= warm_up;
    x.seconds.emplace(step, worse ? std::numeric_limits<double>::infinity()
                                  : seconds);
    x.learnt += worse;
  }
}

// -- all ranks ----------------------------------------------------------------

std::shared_ptr<const step_record> order_book::begin(const step_plan& x) {
  std::lock_guard guard{mutex_};
  note_ = {x.step, x.key, false, false, {}};
  last_promise_ = 0;
  auto& y = use(x.key);
  if (x.what == step_plan::mode::record) {
    note_.recorded = true;
    return nullptr;
  }
  auto i = y.records.find(x.source);
  if (i == y.records.end())
    throw error{error_code::internal, "step " + std::to_string(x.step.value)
                                        + " replays step "
                                        + std::to_string(x.source.value)
                                        + ", of which this rank has no record"};
  choose(y, x.source);
  note_.replayed = true;
  note_.source = x.source;
  replayed_ = y.records.at(x.source);
  last_promise_ = replayed_->last_promise;
  return replayed_;
}

void order_book::recorded(const step_plan& x, step_record record) {
  std::lock_guard guard{mutex_};
  auto& y = use(x.key);
  ++y.count;
  y.records[x.step] = std::make_shared<const step_record>(std::move(record));
}

void order_book::diverged(const std::string& how) {
  std::lock_guard guard{mutex_};
  note_.divergence = how;
  replayed_ = nullptr;
}

void order_book::refused() {
  std::lock_guard guard{mutex_};
  note_.refused = true;
}

std::string order_book::describe(microbatch_id m,
                                 const std::string& how) const {
  auto key = static_mode() ? "smp.static_mode" : "smp.deterministic_server";
  return "microbatch " + std::to_string(m.value) + " diverges from step "
         + std::to_string(note().source.value) + ", which " + key
         + " replays: " + how;
}

bool order_book::foretells() const {
  std::lock_guard guard{mutex_};
  return options_.static_mode && !options_.fixed_order && !misled_;
}

void order_book::misled() {
  std::lock_guard guard{mutex_};
  misled_ = true;
}

void order_book::end() {
  std::lock_guard guard{mutex_};
  replayed_ = nullptr;
}

order_book::step_note order_book::note() const {
  std::lock_guard guard{mutex_};
  return note_;
}

std::shared_ptr<const step_record> order_book::find(uint64_t key,
                                                    step_id step) const {
  std::lock_guard guard{mutex_};
  if (auto* x = find(key))
    if (auto i = x->records.find(step); i != x->records.end())
      return i->second;
  return nullptr;
}

void order_book::choose(uint64_t key, step_id step, step_record record,
                        uint64_t order) {
  std::lock_guard guard{mutex_};
  auto& x = use(key);
  x.records[step] = std::make_shared<const step_record>(std::move(record));
  choose(x, step);
  x.order = order;
}

void order_book::clear() {
  std::lock_guard guard{mutex_};
  entries_.clear();
}

void order_book::outdate() {
  std::lock_guard guard{mutex_};
  for (auto& x : entries_)
    x = forgotten(x);
}

uint64_t order_book::recorded_steps(uint64_t key) const {
  std::lock_guard guard{mutex_};
  auto* x = find(key);
  return x ? x->count : 0;
}

// -- executions ---------------------------------------------------------------

bool order_book::replaying() const {
  std::lock_guard guard{mutex_};
  return replayed_ != nullptr;
}

std::shared_ptr<const recorded_call> order_book::sent(request_id execution,
                                                      uint32_t number) const {
  std::lock_guard guard{mutex_};
  auto* x = replayed_ ? replayed_->find(execution) : nullptr;
  if (x == nullptr)
    return nullptr;
  for (auto& y : x->calls)
    if ((y.kind == call_kind::remote || y.kind == call_kind::promise)
        && number-- == 0)
      return {replayed_, &y};
  return nullptr;
}

uint32_t order_book::last_promise() const {
  std::lock_guard guard{mutex_};
  return last_promise_;
}

// -- helpers ------------------------------------------------------------------

/// @returns the step to replay next, or nothing yet. (The code that runs the
/// steps computes a fixed order, and thereby chooses the step.)
std::optional<step_id> order_book::best(const entry& x) const {
  if (x.chosen || options_.fixed_order
      || x.seconds.size() < options_.steps + std::min(x.learnt, max_learnt))
    return x.chosen;
  return std::ranges::min_element(x.seconds, {},
                                  [](auto& y) { return y.second; })
    ->first;
}

order_book::entry order_book::forgotten(const entry& x) {
  return {x.key, {}, {}, 0, x.count, {}, 0};
}

const order_book::entry* order_book::find(uint64_t key) const {
  auto i = std::find_if(entries_.begin(), entries_.end(),
                        [&](auto& x) { return x.key == key; });
  return i == entries_.end() ? nullptr : &*i;
}

order_book::entry& order_book::use(uint64_t key) {
  auto i = std::find_if(entries_.begin(), entries_.end(),
                        [&](auto& x) { return x.key == key; });
  if (i != entries_.end())
    entries_.splice(entries_.begin(), entries_, i);
  else
    entries_.push_front({key, {}, {}, 0, 0, {}, 0});
  if (entries_.size() > max_keys)
    entries_.pop_back();
  return entries_.front();
}

void order_book::choose(entry& x, step_id step) {
  x.chosen = step;
  x.seconds.clear();
  std::erase_if(x.records, [&](auto& y) { return y.first != step; });
}

} // namespace smp
