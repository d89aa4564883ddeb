#pragma once

#include "actors/protocol/introduction.hpp"
#include "transport/error.hpp"

#include <cstdint>
#include <vector>

namespace smp {

/// The processes of the other ranks on this machine. Normally their parent, the
/// launcher, notices when one ends. While the launcher is stopped, nothing
/// does: the process stays as a zombie, and UCX's keepalive takes it for alive.
class neighbour_processes {
public:
  neighbour_processes() = default;

  /// @param me this rank, one of `all`, the ranks that joined
  neighbour_processes(const std::vector<member>& all, const member& me);

  /// @returns the processes that a signal or an error ended since the last
  /// call. Those ended by a signal come first, as the others may be
  /// consequences. Exit code 0 counts as an orderly end.
  std::vector<failure> take_ended();

private:
  struct process {
    rank_id rank;
    int64_t pid;
    uint64_t start_time;
  };

  std::vector<process> processes_;
};

} // namespace smp
