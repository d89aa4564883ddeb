// The view of a rank for tools that inspect the run from outside.

#include "runtime/session/inspection.hpp"

#include "actors/host/node_status.hpp"
#include "actors/inspection/entry_file.hpp"
#include "runtime/device/rank_device.hpp"
#include "runtime/session/rank_runtime.hpp"
#include "runtime/session/session.hpp"
#include "transport/process_state.hpp"

#include <exception>
#include <utility>

#include <unistd.h>

namespace smp {

namespace {

/// Timeout for the replies of a rank's actors; an INSPECTOR waits longer.
constexpr std::chrono::milliseconds inspection_limit{150};

} // namespace

// -- a rank -------------------------------------------------------------------

void rank_runtime::write_to(const std::string& run_dir) {
  run_dir_ = run_dir;
  steps().write_traces_to(run_dir);
}

rank_status rank_runtime::status() {
  rank_status result;
  result.pid = ::getpid();
  result.host = host_name();
  result.pp_rank = pp_rank_;
  result.tp_rank = own_layout_.rank(comm_group::tp, self_);
  result.rdp_rank = own_layout_.rank(comm_group::rdp, self_);
  result.view = view(inspection_limit);
  auto usage = board_->look_at_usage();
  result.up_seconds = usage.up;
  result.busy_seconds = usage.busy;
  result.bubble = usage.bubble;
  auto memory = memory_of_this_process();
  result.memory = memory.now;
  result.peak_memory = memory.peak;
  if (own_device_) {
    auto x = own_device_->last_memory();
    result.device = device_status{own_device_->get().str(), x.now, x.peak,
                                  x.total};
  }
  if (own_offload_) {
    auto x = own_offload_->status();
    result.offload = offload_status{x.bytes,       x.peak_bytes, x.file_bytes,
                                    x.written,     x.read,       x.stayed,
                                    x.wait_seconds};
  }
  auto moved = fabric_->stats();
  result.comm.messages_sent = moved.messages_sent;
  result.comm.bytes_sent = moved.bytes_sent;
  result.comm.messages_received = moved.messages_received;
  result.comm.bytes_received = moved.bytes_received;
  result.comm.messages_refused = moved.messages_refused;
  result.comm.stages = communication();
  if (std::shared_lock guard{node_mutex_}; node_)
    node_->describe(result, inspection_limit);
  else
    result.view.complete = true; // no actors, so none is stuck
  actor_entries entries{self_};
  for (auto& stage : result.comm.stages.stages)
    result.actors.push_back(entries.stage(stage));
  return result;
}

// -- a run --------------------------------------------------------------------

inspectable_run::inspectable_run(session& s, const std::string& run_dir)
  : session_(s), run_dir_(run_dir), unwinding_(std::uncaught_exceptions()) {
  // Our launcher does it itself.
  if (s.run_dir().empty()) {
    s.internals().leave_record_in(run_dir);
    s.internals().write_to(run_dir);
  }
  if (s.rank() > 0)
    return;
  if (auto entry = s.internals().open_inspection())
    entry_ = std::make_unique<published_entry>(run_dir, *entry);
}

inspectable_run::~inspectable_run() {
  if (std::uncaught_exceptions() > unwinding_)
    session_.internals().leave_record();
}

} // namespace smp
