#pragma once

#include "actors/flight/trace_file.hpp"
#include "partition/schedule/checker.hpp"
#include "transport/flight/flight_record.hpp"

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace smp {

class rank_context;

/// Notes the memory of the rank if it is traced: on a device, what it has
/// allocated there.
void trace_memory(const rank_context& rank);

/// Writes a trace of the steps that `monitor.trace` names: each rank keeps all
/// its events from the begin of the first to the begin of the step after the
/// last, or to the end of the session, and rank 0 makes one file of them.
class trace_recorder {
public:
  /// @param rank outlives this
  explicit trace_recorder(const rank_context& rank);

  ~trace_recorder();

  /// Makes rank 0 write to this folder; else it writes to the current one.
  void write_to(std::string dir) {
    dir_ = std::move(dir);
  }

  /// Step `x`, as users count them, is about to begin; 0: one that they do not
  /// count. Every rank calls this with the same steps. @throws error if a rank
  /// is lost; a file that cannot be written is only reported
  void before(uint64_t x);

  /// Whether what was planned for the steps is still to be told: `plan`.
  bool wants_plan() const noexcept;

  /// On rank 0: the schedule as it was simulated for one step.
  void plan(const schedule_report& x);

  /// No step follows. As `before`.
  void finish();

private:
  enum class state : uint8_t { waits, runs, over };

  void gather();
  std::vector<planned_slice>
  planned_for(std::span<const flight_log> logs) const;

  const rank_context& rank_;
  std::string dir_;
  state state_ = state::waits;
  uint64_t first_ = 0; // 0: no trace
  uint64_t last_ = 0;
  std::shared_ptr<flight_trace> running_;
  std::optional<schedule_report> plan_;
};

} // namespace smp
