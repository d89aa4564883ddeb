#pragma once

// Shows the output of a process, and logs it.

#include "transport/files/file_descriptor.hpp"

#include <string>
#include <thread>

namespace smp {

/// Copies the stdout and stderr of a process to those of this process as they
/// come, and to one log file. A console that takes no output (a pager, Ctrl-S)
/// blocks that process, but never the owner of this object. In the log, a line
/// that was overwritten (by carriage returns, as progress lines are) appears
/// with its last text only.
class output_tee {
public:
  /// @param appends the log goes on; else it begins anew
  /// @throws error (config) if the log cannot be written
  explicit output_tee(const std::string& log_path, bool appends = false);

  /// Copies everything written so far, then ends.
  ~output_tee();

  output_tee(const output_tee&) = delete;
  output_tee& operator=(const output_tee&) = delete;

  /// For the process: becomes its stdout.
  int out() const noexcept {
    return writers_[0].get();
  }

  /// For the process: becomes its stderr.
  int err() const noexcept {
    return writers_[1].get();
  }

  /// Call this once the process has them: then the streams end with it.
  void close_writers();

private:
  file_descriptor log_;
  file_descriptor stop_; // eventfd
  file_descriptor readers_[2];
  file_descriptor writers_[2];
  std::thread thread_;
};

} // namespace smp
