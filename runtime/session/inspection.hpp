#pragma once

// Looking at a run from outside (docs/inspect.md).

#include <memory>
#include <string>

namespace smp {

class published_entry;
class session;

/// While this lives, smp-inspect and smp-top can look at the run through
/// `run_dir`, which exists. To be made on rank 0; on other ranks, and where one
/// can look through `session::run_dir` already, it does nothing.
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
