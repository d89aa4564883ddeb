#pragma once

// Lets tools inspect a run from outside (docs/inspect.md).

#include <memory>
#include <string>

namespace smp {

class published_entry;
class session;

/// While alive, smp-inspect and smp-top can inspect the run through `run_dir`,
/// which must exist. Create one on each rank: if an exception ends a rank, or
/// the run stalls, it leaves there what it did last. Does nothing if the run
/// can already be inspected through `session::run_dir`.
class inspectable_run {
public:
  /// @throws error (config) naming the file if it cannot be written
  inspectable_run(session& s, const std::string& run_dir);
  ~inspectable_run();
  inspectable_run(const inspectable_run&) = delete;
  inspectable_run& operator=(const inspectable_run&) = delete;

private:
  session& session_;
  std::string run_dir_;
  int unwinding_;
  std::unique_ptr<published_entry> entry_;
};

} // namespace smp
