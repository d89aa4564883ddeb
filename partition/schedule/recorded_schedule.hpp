#pragma once

#include "partition/schedule/schedule.hpp"

#include <vector>

namespace smp {

/// Starts and turns around the same tasks as a recorded step, in the same
/// order, without any decision (R33). Unlike a `list_schedule` it need not be
/// complete: a step of an evaluation has no backward phases.
class recorded_schedule : public schedule {
public:
  recorded_schedule(uint64_t microbatches, std::vector<task> tasks);

  std::optional<task> next() override;
  void forward_done(microbatch_id x) override;
  void ended(microbatch_id x) override;

  /// The step diverges from its record: continues like `interleaved_schedule`,
  /// with as many microbatches alive as the record had.
  void diverge();

private:
  std::optional<task> next_recorded();

  microbatch_book book_;
  std::vector<task> tasks_;
  uint64_t active_;
  size_t at_ = 0;
  bool diverged_ = false;
  std::vector<bool> started_; // by microbatch
};

} // namespace smp
