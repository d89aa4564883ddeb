#include "runtime/process/cores.hpp"

#include <algorithm>
#include <numeric>
#include <set>
#include <thread>

#include <sched.h>

namespace smp {

std::vector<uint32_t> usable_cores() {
  std::vector<uint32_t> result;
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof(allowed), &allowed) == 0)
    for (uint32_t i = 0; i < CPU_SETSIZE; ++i)
      if (CPU_ISSET(i, &allowed))
        result.push_back(i);
  if (result.empty()) { // more of them than the set can hold
    result.resize(std::max(1u, std::thread::hardware_concurrency()));
    std::iota(result.begin(), result.end(), 0u);
  }
  return result;
}

uint64_t share_of_cores(const std::vector<uint32_t>& own,
                        const std::vector<std::vector<uint32_t>>& here) {
  std::set<uint32_t> all;
  for (auto& x : here)
    all.insert(x.begin(), x.end());
  uint64_t share = all.size() / std::max<size_t>(1, here.size());
  return std::max<uint64_t>(1, std::min<uint64_t>(own.size(), share));
}

} // namespace smp
