#pragma once

// One child process, from fork to waitpid.

#include "transport/process_state.hpp"

#include <map>
#include <optional>
#include <string>
#include <vector>

#include <sys/types.h>

namespace smp {

struct spawn_options {
  /// Looked up in PATH if it has no slash.
  std::string program;
  /// argv, with the program's name in front.
  std::vector<std::string> arguments;
  /// Set on top of this process's variables.
  std::map<std::string, std::string> environment;
  /// File descriptors that become stdout and stderr; stdin is empty.
  int out = 1;
  int err = 2;
  /// Descriptors that stay open in the child, under their numbers.
  std::vector<int> kept;
  /// A signal that the child blocks until it can handle it; 0: none.
  int blocked = 0;
};

/// Starts a process that leads a process group of its own and is killed when
/// the calling thread ends for whatever reason. It inherits no other descriptor
/// and blocks no other signal; ignored ones stay ignored (nohup), except
/// SIGPIPE.
/// @throws error (config) if the program cannot be executed
pid_t spawn(const spawn_options& x);

/// @returns whether this process ignores a signal, as nohup and background jobs
/// of scripts do on purpose
bool is_ignored(int signal);

/// Reaps a child that has ended, at once, as UCX and others would see a zombie
/// as alive. Kills what the child left in its process group.
/// @returns nothing while `pid` runs
std::optional<process_end> reap(pid_t pid);

/// Waits until all killed processes of the group are gone, but at most 2 s: the
/// kernel may hold a process in a driver or file system.
/// @pre this process adopts orphans (PR_SET_CHILD_SUBREAPER)
/// @returns false if some process is still there
bool reap_group(pid_t pid);

} // namespace smp
