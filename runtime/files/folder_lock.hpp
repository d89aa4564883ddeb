#pragma once

// Two runs that write to one folder would take each other's files away.

#include "transport/files/file_descriptor.hpp"

#include <chrono>
#include <string>

namespace smp {

/// Keeps a folder for one run, on whichever machines that folder can be seen.
/// The kernel releases the lock when its process ends, however it ends; the
/// file `.smp-lock` stays, and alone it locks nothing. Where a file system
/// knows no locks, nothing is kept.
class folder_lock {
public:
  /// Makes the folder if necessary. A run that was just killed may still have
  /// it, so this waits for the lock.
  /// @param who names this run to others: "run runs/x, process 12 on
  /// host a"
  /// @throws error (config) naming the folder and the run that has it, or what
  ///         the system says
  folder_lock(const std::string& dir, const std::string& who,
              std::chrono::milliseconds patience = std::chrono::seconds{5});

private:
  file_descriptor file_;
};

} // namespace smp
