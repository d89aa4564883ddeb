#include "runtime/execution/call_streams.hpp"

#include "runtime/base/fault.hpp"

#include <ATen/SequenceNumber.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/function.h>

#include <algorithm>
#include <limits>
#include <string_view>

namespace smp {

namespace {

uint32_t& count_of(std::vector<call_streams::count>& xs, uint64_t module) {
  // Usually a place calls another module than the last time.
  auto i = std::find_if(xs.rbegin(), xs.rend(),
                        [module](auto& x) { return x.first == module; });
  return i != xs.rend() ? i->second : xs.emplace_back(module, 0).second;
}

constexpr auto open_end = std::numeric_limits<uint64_t>::max();

} // namespace

// -- life ---------------------------------------------------------------------

void call_streams::begin(uint64_t seed) {
  seed_ = seed;
  others_ = 0;
  made_.clear();
  repeating_.reset();
}

void call_streams::end() {
  while (depth_ > 0) {
    top().again = 0;
    leave();
  }
  made_.clear();
}

void call_streams::swap_with_outside() {
  for (size_t i = 0; i < depth_; ++i)
    if (frames_[i].draws)
      return frames_[i].before.swap_with_default();
}

// -- calls that run here ------------------------------------------------------

call_streams::frame& call_streams::push(uint64_t path, uint64_t module) {
  if (depth_ == frames_.size())
    frames_.emplace_back();
  auto& result = frames_[depth_++];
  result.path = path;
  result.module = module;
  result.node = torch::autograd::get_current_node().get();
  result.made = nowhere;
  result.again = 0;
  result.collectives = 0;
  result.draws = false;
  result.counts.clear();
  return result;
}

void call_streams::enter_body() {
  auto& x = push(0, 0);
  x.before = random_stream{seed_};
  x.before.swap_with_default();
  x.draws = true;
  x.made = made_.size();
  made_.push_back({0, 0, 0, 0, at::RecordFunction::currentThreadId(),
                   at::sequence_number::peek(), open_end});
}

void call_streams::enter(uint64_t module) {
  if (depth_ > 0 && top().module == module) {
    ++top().again;
    return;
  }
  auto made = number(module);
  made.end = open_end;
  made_.push_back(made);
  auto& x = push(made.path, module);
  x.made = made_.size() - 1;
  x.before.replace_default(seed_at(x.path));
  x.draws = true;
}

void call_streams::enter_at(uint64_t path, uint64_t module) {
  if (SMP_FAULT("wrong-random-stream"))
    ++path;
  auto& x = push(path, module);
  x.made = made_.size();
  made_.push_back({path, 0, 0, 0, at::RecordFunction::currentThreadId(),
                   at::sequence_number::peek(), open_end});
  x.before.replace_default(seed_at(path));
  x.draws = true;
}

void call_streams::enter_origin(origin x) {
  if (SMP_FAULT("wrong-random-stream"))
    ++x.path;
  push(x.path, 0).counts = std::move(x.counts);
}

uint64_t call_streams::seed_at(uint64_t seed, uint64_t path) const noexcept {
  return call_seed(others_ == 0 ? seed : path_of_call(seed, others_, 0), path);
}

void call_streams::draw_as(uint64_t seed, uint64_t path,
                           const std::function<void()>& f) const {
  random_stream before{random_stream::empty{}};
  before.replace_default(seed_at(seed, path));
  try {
    f();
  } catch (...) {
    before.restore_default();
    throw;
  }
  before.restore_default();
}

call_streams::origin call_streams::here() const {
  if (depth_ == 0)
    return {};
  auto& x = frames_[depth_ - 1];
  return {x.path, x.counts};
}

void call_streams::leave() {
  auto& x = top();
  if (x.again > 0) {
    --x.again;
    return;
  }
  if (x.draws)
    x.before.restore_default();
  if (x.made != nowhere)
    made_[x.made].end = at::sequence_number::peek();
  --depth_;
}

// -- numbers of calls ---------------------------------------------------------

call_streams::made_call call_streams::number(uint64_t module) {
  auto node = torch::autograd::get_current_node();
  auto here = depth_ > 0 && top().node == node.get();
  if (node && !here)
    if (auto known = repeated(*node, module))
      return *known;
  made_call result;
  if (depth_ > 0) {
    result.caller = top().path;
    result.number = count_of(top().counts, module)++;
  }
  result.path = path_of_call(result.caller, module, result.number);
  result.module = module;
  result.thread = at::RecordFunction::currentThreadId();
  result.begin = result.end = at::sequence_number::peek();
  return result;
}

uint64_t call_streams::call(uint64_t module) {
  return made_.emplace_back(number(module)).path;
}

call_streams::origin
call_streams::call_each(const std::vector<uint64_t>& modules) {
  origin result;
  std::vector<uint64_t> seen;
  for (auto module : modules) {
    if (module == 0)
      continue; // has no stream
    auto& made = made_.emplace_back(number(module));
    result.path = made.caller;
    // Further calls of it are counted on from there, at the owner as here.
    if (std::find(seen.begin(), seen.end(), module) != seen.end())
      continue;
    seen.push_back(module);
    if (made.number > 0)
      result.counts.emplace_back(module, made.number);
  }
  return result;
}

// -- backward -----------------------------------------------------------------

std::vector<call_streams::made_call> call_streams::take_made() {
  for (size_t i = 0; i < depth_; ++i)
    frames_[i].made = nowhere;
  return std::exchange(made_, {});
}

void call_streams::begin_backward(std::vector<made_call> made) {
  made_ = std::move(made);
  repeating_.reset();
}

uint32_t call_streams::calls_of(uint64_t module, uint64_t caller) const {
  return static_cast<uint32_t>(
    std::count_if(made_.begin(), made_.end(), [&](auto& x) {
      return x.module == module && x.caller == caller;
    }));
}

std::optional<call_streams::made_call>
call_streams::repeated(const torch::autograd::Node& node, uint64_t module) {
  auto thread = node.thread_id();
  auto made_at = node.sequence_nr();
  auto place = std::find_if(made_.rbegin(), made_.rend(), [&](auto& x) {
    return x.thread == thread && x.begin <= made_at && made_at < x.end;
  });
  if (place == made_.rend())
    return std::nullopt;
  if (std::pair id{thread, made_at}; repeating_ != id) {
    repeating_ = id;
    repeats_.clear();
  }
  auto skipped = count_of(repeats_, module)++;
  made_call result;
  result.caller = place->path;
  auto repeats = [&](auto& x) {
    return x.module == module && x.caller == result.caller && x.thread == thread
           && x.begin > made_at && skipped-- == 0;
  };
  if (auto x = std::find_if(made_.begin(), made_.end(), repeats);
      x != made_.end())
    result.number = x->number;
  else // called in backward only
    result.number = skipped + calls_of(module, result.caller);
  result.path = path_of_call(result.caller, module, result.number);
  result.thread = at::RecordFunction::currentThreadId();
  result.begin = result.end = at::sequence_number::peek();
  return result;
}

} // namespace smp
