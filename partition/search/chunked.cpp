#include "partition/search/chunked.hpp"

#include "partition/search/chain.hpp"

#include <algorithm>
#include <utility>

namespace smp {

namespace {

/// Number of nodes at the end that are tried on the device of the root.
constexpr size_t longest_tail = 32;

/// For each node, the number of its segment among those of its device.
assignment number_segments(const partition_problem& p, const assignment& x,
                           uint32_t chunks) {
  std::vector<uint32_t> segments(p.devices);
  assignment result(x.size());
  for (size_t i = 0; i < x.size(); ++i) {
    auto& here = segments[x[i]];
    here += i == 0 || x[i] != x[i - 1];
    result[i] = std::min(here, chunks) - 1;
  }
  return result;
}

} // namespace

chunked_decision chunked_partition(const partition_problem& p,
                                   const communication& crossing,
                                   uint32_t chunks) {
  struct candidate {
    assignment devices;
    partition_score score;
  };
  std::vector<candidate> found;
  auto pieces = p.devices * chunks;
  for (double grain : {1.0, 1.0 / 2, 1.0 / 4, 1.0 / 8, 0.0}) {
    auto x = split_chain(p, grain / pieces, pieces);
    for (size_t i = 0; i < x.size(); ++i)
      x[i] = p.fixed[i].value_or(x[i] % p.devices);
    found.push_back({x, score(p, x, crossing)});
    // The root's code calls the last modules (norms, heads): these are cheap,
    // but cost a request each unless they are on the root's device.
    auto end = x.size() - std::min(x.size() - 1, longest_tail);
    for (auto i = x.size(); i-- > end;)
      if (!p.fixed[i] && std::exchange(x[i], 0) != 0)
        found.push_back({x, score(p, x, crossing)});
  }
  auto predicted = [](auto& x, auto& y) {
    return x.score.predicted < y.score.predicted;
  };
  auto limit = std::min_element(found.begin(), found.end(), predicted)
                 ->score.predicted
               * (1 + crossing.tolerance);
  auto best = std::min_element(
    found.begin(), found.end(), [&](auto& x, auto& y) {
      auto key = [&](auto& z) {
        return std::pair{z.score.predicted > limit, z.score.requests};
      };
      return key(x) < key(y);
    });
  auto numbers = number_segments(p, best->devices, chunks);
  return {std::move(best->devices), std::move(numbers)};
}

} // namespace smp
