#include "actors/schedule/step_driver.hpp"

#include "actors/protocol/request_number.hpp"
#include "partition/schedule/recorded_schedule.hpp"

#include <exception>
#include <string>
#include <utility>

namespace smp {

namespace {

std::string describe(const task& x) {
  return (x.what == phase::forward ? "the forward phase of microbatch "
                                   : "the backward phase of microbatch ")
         + std::to_string(x.microbatch.value);
}

} // namespace

step_driver::step_driver(rank_id self, schedule_factory make,
                         driver_output& output)
  : self_(self), make_(std::move(make)), output_(output) {
  // nop
}

step_driver::~step_driver() = default;

void step_driver::run(const scheduled_step& x) {
  const auto microbatches = x.what.microbatches;
  report_ = {x.what.step, std::vector<payload>(microbatches), {}};
  started_.assign(microbatches, false);
  turns_ = 0;
  in_forward_.clear();
  left_ = microbatches;
  active_ = true;
  guarded([&] {
    if (x.recorded.empty()) {
      schedule_ = x.serial ? make_serial_schedule(microbatches)
                           : make_(microbatches);
      return;
    }
    auto y = std::make_unique<recorded_schedule>(microbatches, x.recorded);
    recorded_ = y.get();
    schedule_ = std::move(y);
  });
  pump();
}

void step_driver::forward_done(const smp::forward_done& x) {
  if (!active_)
    return;
  waiting_.emplace(x.microbatch, x.id);
  end_forward(x.microbatch);
  guarded([&] { schedule_->forward_done(x.microbatch); });
  pump();
}

void step_driver::ended(response x) {
  auto i = running_.find(x.id);
  if (i == running_.end())
    return;
  auto mb = i->second;
  running_.erase(i);
  waiting_.erase(mb);
  --left_;
  end_forward(mb);
  output_.microbatch_over({report_.step, mb});
  report_.values[mb.value] = std::move(x.body);
  if (x.error && !report_.error)
    report_.error = std::move(x.error);
  guarded([&] { schedule_->ended(mb); });
  pump();
}

void step_driver::failed(const step_failed& x) {
  if (!active_ || x.step != report_.step || report_.error)
    return;
  report_.error = x.error;
  pump();
}

void step_driver::diverged(const step_diverged& x) {
  if (!active_ || x.step != report_.step || recorded_ == nullptr)
    return;
  recorded_->diverge();
  pump();
}

void step_driver::rank_changed(const rank_report& x) {
  if (!active_ || x.step != report_.step)
    return;
  guarded([&] { schedule_->rank_changed(x.level); });
  pump();
}

void step_driver::decided() {
  pump();
}

/// Calls the schedule, which may be user code. Once the step has failed, it is
/// not called any more.
template <class F>
void step_driver::guarded(F f) {
  if (report_.error)
    return;
  try {
    f();
  } catch (const error& e) {
    fail(e.cause());
  } catch (const std::exception& e) {
    fail({error_code::internal,
          self_,
          {},
          std::string{"the schedule threw: "} + e.what()});
  }
}

void step_driver::start(const task& x) {
  auto mb = x.microbatch;
  if (x.what == phase::backward) {
    auto i = waiting_.find(mb);
    if (i == waiting_.end())
      throw error{error_code::internal,
                  "the schedule starts " + describe(x) + ", which is not due"};
    auto id = i->second;
    waiting_.erase(i);
    return output_.grant({id, {}, {}});
  }
  if (mb.value >= started_.size() || started_[mb.value])
    throw error{error_code::internal,
                "the schedule starts " + describe(x) + ", which is not due"};
  started_[mb.value] = true;
  auto id = request_id{self_, root_request_number(report_.step, mb)};
  running_.emplace(id, mb);
  auto start_number = turns_++;
  in_forward_.emplace(mb, start_number);
  output_.start(
    {id, report_.step, mb, root_module, phase::forward, {}, start_number});
}

void step_driver::end_forward(microbatch_id x) {
  if (auto start_number = in_forward_.extract(x))
    output_.forward_over({report_.step, start_number.mapped()});
}

void step_driver::fail(failure x) {
  report_.error = std::move(x);
  output_.failed({report_.step, report_.error});
}

void step_driver::pump() {
  if (!active_)
    return;
  guarded([&] {
    while (auto x = schedule_->next())
      start(*x);
  });
  if (!report_.error && left_ > 0 && running_.size() == waiting_.size()
      && !schedule_->deciding())
    fail({error_code::stalled,
          self_,
          {},
          "the schedule starts nothing although nothing runs: "
            + std::to_string(left_) + " microbatches are left, "
            + std::to_string(waiting_.size()) + " wait for their backward "
            + "phase"});
  if (left_ > 0 && !(report_.error && running_.empty()))
    return;
  active_ = false;
  recorded_ = nullptr;
  schedule_.reset();
  if (report_.error)
    report_.values.clear();
  auto step = report_.step;
  output_.step_over(std::exchange(report_, {step, {}, {}}));
}

} // namespace smp
