#pragma once

// Lets tools inspect a run from outside (docs/inspect.md).

#include <memory>
#include <string>

namespace smp {

class published_entry;
class session;

/// While alive, smp-inspect and smp-top can inspect the run through `run_dir`,
/// which must exist. Create it on rank 0; on other ranks, and if the run can
/// already be inspected through `session::run_dir`, it does nothing.
class inspectable_run {
public:
  /// @throws error (config) naming the file if it cannot be written
  inspectable_run(session& s, const std::string& run_dir);
  ~inspectable_run();
  inspectable_run(const inspectable_run&) = delete;
  inspectable_run& operator=(const inspectable_run&) = delete;

private:
  std::unique_ptr<published_entry> entry_;
};

} // namespace smp
