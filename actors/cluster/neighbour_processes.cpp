#include "actors/cluster/neighbour_processes.hpp"

#include "transport/process_state.hpp"

#include <algorithm>
#include <utility>

namespace smp {

neighbour_processes::neighbour_processes(const std::vector<member>& all,
                                         const member& me) {
  for (auto& x : all) {
    if (x.rank == me.rank || x.machine != me.machine)
      continue;
    // The ranks that joined already know of processes that ended before.
    if (auto state = state_of_process(x.pid); state && !state->ended())
      processes_.push_back({x.rank, x.pid, state->start_time});
  }
}

std::vector<failure> neighbour_processes::take_ended() {
  std::vector<std::pair<rank_id, process_end>> ended;
  std::erase_if(processes_, [&](const process& x) {
    auto state = state_of_process(x.pid);
    // Unknown: the process is gone, or its pid belongs to another one now.
    if (!state || state->start_time != x.start_time)
      return true;
    if (!state->ended())
      return false;
    if (state->end.code != 0)
      ended.emplace_back(x.rank, state->end);
    return true;
  });
  std::stable_partition(ended.begin(), ended.end(),
                        [](auto& x) { return x.second.signal != 0; });
  std::vector<failure> result;
  for (auto& [rank, end] : ended)
    result.push_back({error_code::rank_down, rank, {}, end.describe()});
  return result;
}

} // namespace smp
