#include "runtime/intercept/trace/traced_model_call.hpp"

#include "runtime/intercept/trace/tracer.hpp"

#include <algorithm>
#include <chrono>
#include <numeric>
#include <optional>
#include <utility>

namespace smp {

namespace {

/// Timed passes are repeated until they take this long together, or until
/// several in a row found hardly anything faster.
constexpr auto timing_budget = std::chrono::seconds{1};
constexpr size_t stable_passes = 3;
constexpr double hardly = 0.02;

} // namespace

traced_model_call::traced_model_call() : tracer_(tracer::current()) {
  if (tracer_ && tracer_->stack_.size() > 1)
    tracer_ = nullptr;
  if (!tracer_)
    return;
  measured_ = !tracer_->counts();
  begin_ = clock::now();
  number_ = tracer_->times_.begin(std::nullopt);
}

traced_model_call::~traced_model_call() {
  if (!tracer_)
    return;
  auto& x = *tracer_;
  x.stack_.resize(1);
  x.times_.end(number_);
  x.times_.resize(number_ + 1);
  x.pass_ = measured_ ? tracer::pass::time : tracer::pass::all;
  for (size_t i = 0; i < best_.size(); ++i)
    x.repeated_[i] += best_[i];
  x.result_.repeated_seconds += std::accumulate(best_.begin(), best_.end(),
                                                0.0);
}

bool traced_model_call::next() {
  using pass = tracer::pass;
  auto& x = *tracer_;
  if (measured_) {
    x.pass_ = pass::none;
    return false;
  }
  if (passes_ > 0)
    end_pass();
  auto again = passes_ == 1
               || (stable_ < stable_passes
                   && clock::now() - begin_ < timing_budget);
  if (passes_ == 0)
    x.pass_ = pass::count;
  else
    x.pass_ = again && x.options_.times ? pass::time : pass::none;
  ++passes_;
  x.track_results(x.pass_ == pass::count);
  if (x.pass_ == pass::none)
    return false;
  x.enter(module_id{0});
  return true;
}

void traced_model_call::end_pass() {
  auto& x = *tracer_;
  x.leave();
  x.restore();
  auto seconds = x.times_.seconds(x.repeated_.size(), number_ + 1);
  x.times_.resize(number_ + 1);
  if (x.pass_ != tracer::pass::time)
    return;
  if (best_.empty()) {
    best_ = std::move(seconds);
    return;
  }
  auto all = [this] {
    return std::accumulate(best_.begin(), best_.end(), 0.0);
  };
  auto before = all();
  for (size_t i = 0; i < best_.size(); ++i)
    best_[i] = std::min(best_[i], seconds[i]);
  stable_ = all() < (1 - hardly) * before ? 0 : stable_ + 1;
}

} // namespace smp
