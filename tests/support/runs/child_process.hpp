#pragma once

#include <chrono>
#include <map>
#include <optional>
#include <string>

#include <sys/types.h>

namespace smp::test {

/// Another process that runs a hidden test case of this program, with a socket
/// to talk to it. Never outlives its owner, even if that one crashes.
class child_process {
public:
  /// @param test_case its whole name
  /// @param environment what is set in addition; an empty value unsets
  explicit child_process(const std::string& test_case,
                         std::map<std::string, std::string> environment = {});

  /// Kills the process if it still runs.
  ~child_process();

  child_process(const child_process&) = delete;
  child_process& operator=(const child_process&) = delete;

  /// Sends one packet.
  void tell(const std::string& x);

  /// @returns the next packet, or nothing after the deadline or at the end of
  /// the process.
  std::optional<std::string>
  hear(std::chrono::milliseconds limit = std::chrono::seconds{30});

  /// Sends a signal. Waits until a killed process is gone, and until all
  /// threads of a stopped one are.
  void signal(int x);

  /// Waits for the end. @returns the exit code, or minus the signal
  int join();

private:
  pid_t pid_ = -1;
  int socket_ = -1;
  std::optional<int> status_;
};

/// The other end: what a hidden test case uses that was started so.
class parent_process {
public:
  /// @returns whether this process was started by `child_process`.
  static bool exists();

  parent_process();

  void tell(const std::string& x);

  /// @throws std::runtime_error at the end of the parent
  std::string hear();

private:
  int socket_;
};

} // namespace smp::test
