#pragma once

#include "actors/protocol/introduction.hpp"
#include "transport/error.hpp"

#include <cstdint>
#include <vector>

namespace smp {

/// The processes of the other ranks on this machine. That one of them ended,
/// its parent hears first; but while the parent is stopped, nobody does: the
/// process is kept as a zombie, and the keepalive of UCX takes it for alive.
class neighbour_processes {
public:
  neighbour_processes() = default;

  /// @param me stands in `all`, all ranks that joined
  neighbour_processes(const std::vector<member>& all, const member& me);

  /// @returns those that a signal or an error ended since the last look, those
  /// by a signal first: the others may be consequences. Who ends with code 0
  /// left in an orderly way.
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
