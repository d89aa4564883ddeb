#include "actors/stalls/branches.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <compare>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>

namespace smp {

namespace {

/// What peers must call equally often.
struct place {
  phase what;
  std::string module;

  auto operator<=>(const place&) const = default;
};

/// Tells whether a thread waits in a way unknown to peers: in a collective of
/// the user's, or outside of the step.
bool waits_otherwise(const rank_view& view) {
  auto is_shared = [&](const wait_subject& x) {
    return x.group == view.sharers
           && std::ranges::any_of(view.shared, [&](auto& y) {
                return std::ranges::count(y.running, x.name) > 0;
              });
  };
  return std::ranges::any_of(view.activities, [&](auto& x) {
    if (x.executes || x.who == activity::kind::schedule)
      return true;
    if (x.who == activity::kind::main)
      return !x.ends_step;
    using kind = wait_subject::kind;
    return x.subject.what == kind::exchange
           || (x.subject.what == kind::collective && !is_shared(x.subject));
  });
}

/// @returns the oldest microbatch in which a rank waits for peers
std::optional<microbatch_id> first_stuck(const std::vector<rank_view>& views) {
  std::optional<microbatch_id> result;
  for (auto& view : views)
    for (auto& x : view.shared)
      if (x.waits && (!result || x.microbatch < *result))
        result = x.microbatch;
  return result;
}

std::string times_text(uint64_t n) {
  return n == 0   ? "never"
         : n == 1 ? "once"
         : n == 2 ? "twice"
                  : fmt::format("{} times", n);
}

std::string ranks_text(const std::vector<rank_id>& xs) {
  auto result = fmt::format("rank{} {}", xs.size() > 1 ? "s" : "",
                            xs.front().value);
  for (size_t i = 1; i < xs.size(); ++i)
    result += fmt::format("{}{}", i + 1 < xs.size() ? ", " : " and ",
                          xs[i].value);
  return result;
}

/// @param calls by rank
/// @returns "'up', forward, was called twice by rank 0 and once by rank 1"
std::string place_text(const place& x,
                       const std::map<rank_id, uint64_t>& calls) {
  std::map<uint64_t, std::vector<rank_id>, std::greater<>> ranks;
  for (auto [rank, n] : calls)
    ranks[n].push_back(rank);
  std::string counts;
  for (auto& [n, who] : ranks)
    counts += fmt::format("{}{} by {}", counts.empty() ? "" : " and ",
                          times_text(n), ranks_text(who));
  return fmt::format(
    "{}, {}, was called {}{}",
    x.module.empty() ? "the step body" : "'" + x.module + "'",
    x.what == phase::forward ? "forward" : "backward", counts,
    ranks.size() == 1
      ? ", but not in the same way: by different callers, or of "
        "inputs of which some require grad"
      : "");
}

} // namespace

failure different_branches(const std::vector<rank_view>& views) {
  auto stuck = first_stuck(views);
  if (!stuck || std::ranges::any_of(views, waits_otherwise))
    return {};
  std::set<std::vector<rank_id>> groups;
  for (auto& view : views)
    groups.insert(view.sharers);
  std::string text;
  std::string module;
  for (auto& group : groups) {
    std::map<place, std::map<rank_id, uint64_t>> calls;
    std::set<place> waited_at;
    for (auto& view : views)
      if (view.sharers == group)
        for (auto& x : view.shared)
          if (x.microbatch == *stuck) {
            calls[{x.what, x.module}][view.rank] = x.calls;
            if (x.waits)
              waited_at.insert({x.what, x.module});
          }
    for (auto& x : waited_at) {
      for (auto rank : group)
        calls[x].try_emplace(rank, 0);
      if (text.empty())
        module = x.module;
      else
        text += "; ";
      text += place_text(x, calls[x]);
    }
  }
  return {error_code::user_code, no_rank, module,
          fmt::format("in microbatch {}, {}: ranks that share modules have to "
                      "call them equally often, whatever their data "
                      "(docs/tensor_parallel.md)",
                      stuck->value, text)};
}

} // namespace smp
