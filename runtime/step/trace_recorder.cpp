#include "runtime/step/trace_recorder.hpp"

#include "actors/board/rank_board.hpp"
#include "partition/rank_layout.hpp"
#include "runtime/base/print_stderr.hpp"
#include "runtime/base/rank_context.hpp"
#include "runtime/config/session_config.hpp"
#include "runtime/device/rank_device.hpp"
#include "runtime/files/file_io.hpp"
#include "runtime/process/allocated_bytes.hpp"
#include "transport/error.hpp"
#include "transport/exchange.hpp"

#include <fmt/format.h>

#include <sstream>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace smp {

namespace {

constexpr const char* exchange_name = "smp.trace";

/// @returns `x` as a tensor of bytes: it may be large
payload payload_of(std::vector<std::byte> x) {
  auto owner = std::make_shared<std::vector<std::byte>>(std::move(x));
  tensor_ref bytes;
  bytes.shape = {static_cast<int64_t>(owner->size())};
  bytes.data = owner->data();
  bytes.nbytes = owner->size();
  bytes.owner = owner;
  return {{}, {std::move(bytes)}};
}

} // namespace

void trace_memory(const rank_context& rank) {
  auto& record = rank.board().record();
  if (!record.tracing())
    return;
  flight_event x;
  x.kind = flight_kind::memory;
  auto* device = rank.launches();
  x.amount = device ? device->last_memory().now : allocated_bytes();
  record.note(x);
}

trace_recorder::trace_recorder(const rank_context& rank) : rank_(rank) {
  // nop
}

trace_recorder::~trace_recorder() = default;

void trace_recorder::before(uint64_t x) {
  if (last_ == 0)
    if (auto steps = parse_traced_steps(rank_.config().trace))
      std::tie(first_, last_) = *steps;
  if (x == 0)
    return;
  if (state_ == state::runs && x > last_) {
    gather();
  } else if (state_ == state::waits && x == first_) {
    running_ = rank_.board().record().trace();
    state_ = state::runs;
  }
}

bool trace_recorder::wants_plan() const noexcept {
  return state_ == state::runs && rank_.self() == rank_id{0} && !plan_;
}

void trace_recorder::plan(const schedule_report& x) {
  plan_ = x;
}

/// Stretched to the time that the step took: predicted times may be relative.
std::vector<planned_slice>
trace_recorder::planned_for(std::span<const flight_log> logs) const {
  std::vector<planned_slice> result;
  if (!plan_ || plan_->makespan <= 0)
    return result;
  for (auto& log : logs) {
    auto device = rank_.layout().rank(comm_group::pp, log.rank);
    for (auto& step : timeline_of(log).slices) {
      if (step.what != flight_slice::kind::step || step.step == 0)
        continue;
      auto scale = static_cast<double>(step.end - step.begin) / plan_->makespan;
      for (auto& x : plan_->timeline)
        if (x.device == device)
          result.push_back({log.rank, step.step,
                            static_cast<int64_t>(x.begin * scale),
                            static_cast<int64_t>(x.end * scale),
                            x.what.microbatch, x.what.what});
    }
  }
  return result;
}

void trace_recorder::finish() {
  if (state_ == state::runs)
    gather();
  else if (state_ == state::waits && first_ > 0 && rank_.self() == rank_id{0})
    print_stderr(
      "smp: monitor.trace = \"{}\": there is no trace, as step {} "
      "did not begin here\n",
      rank_.config().trace, first_);
}

void trace_recorder::gather() {
  auto lost = running_->lost();
  auto image = rank_.board().record().image(running_->take(), lost);
  running_ = nullptr;
  state_ = state::over;
  auto& messages = rank_.exchange();
  if (rank_.self() != rank_id{0})
    return messages.send(rank_id{0}, exchange_name,
                         payload_of(std::move(image)));
  std::vector<flight_log> logs{read_flight_image(image)};
  auto ranks = rank_.layout().size(comm_group::world);
  for (uint64_t i = 1; i < ranks; ++i) {
    auto got = messages.receive(rank_id{i}, exchange_name);
    auto& bytes = got.tensors.at(0);
    logs.push_back(read_flight_image(
      {static_cast<const std::byte*>(bytes.data), bytes.nbytes}));
    lost += logs.back().lost;
  }
  auto path = (dir_.empty() ? "" : dir_ + "/") + "trace.json";
  std::ostringstream trace;
  write_trace(trace, logs, planned_for(logs));
  try {
    write_text(path, std::move(trace).str());
  } catch (const error& e) {
    return static_cast<void>(
      print_stderr("smp: the trace is lost: {}\n", e.what()));
  }
  print_stderr(
    "smp: steps {} to {} are in {}, which ui.perfetto.dev "
    "shows{}\n",
    first_, last_, path,
    lost == 0 ? ""
              : fmt::format("; {} events had no room: name fewer "
                            "steps in monitor.trace",
                            lost));
}

} // namespace smp
