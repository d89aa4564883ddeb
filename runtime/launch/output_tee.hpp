#pragma once

// Shows what a process writes, and keeps it.

#include "transport/file_descriptor.hpp"

#include <string>
#include <thread>

namespace smp {

/// Copies what a process writes to its stdout and stderr to those of this
/// process as it comes, and to one log file. A console that does not take it
/// (a pager, Ctrl-S) holds up that process, but never who owns this object.
/// In the log, a line that was overwritten (carriage return, as progress lines
/// are) appears with its last text only.
class output_tee {
public:
  /// @throws error (config) if the log cannot be written
  explicit output_tee(const std::string& log_path);

  /// Takes what has been written until now, then ends.
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

  /// Call it when the process has them: from then on its end ends the streams.
  void close_writers();

private:
  file_descriptor log_;
  file_descriptor stop_; // eventfd
  file_descriptor readers_[2];
  file_descriptor writers_[2];
  std::thread thread_;
};

} // namespace smp
