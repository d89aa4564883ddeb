#include "actors/stalls/wait_graph.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstdint>
#include <tuple>
#include <utility>
#include <vector>

namespace smp {

namespace {

using kind = activity::kind;

std::string seconds_text(double x) {
  return x < 9.95 ? fmt::format("{:.1f} s", x) : fmt::format("{:.0f} s", x);
}

/// During a step, the user's thread of every rank waits for the contexts of
/// pp_rank 0, so this says little.
bool is_step_end(const activity& x) {
  return x.subject.what == wait_subject::kind::step_end;
}

} // namespace

wait_graph::wait_graph(std::vector<rank_view> views,
                       std::map<rank_id, double> silent)
  : silent_(std::move(silent)) {
  for (auto& view : views) {
    for (auto& x : view.activities)
      nodes_.push_back({view.rank, std::move(x)});
    view.activities.clear();
    views_.emplace(view.rank, std::move(view));
  }
}

bool wait_graph::waiting() const {
  return std::any_of(nodes_.begin(), nodes_.end(),
                     [](auto& x) { return !x.what.executes; });
}

// -- edges --------------------------------------------------------------------

std::optional<size_t> wait_graph::serving(rank_id rank, request_id x) const {
  for (size_t i = 0; i < nodes_.size(); ++i)
    if (nodes_[i].rank == rank && nodes_[i].what.serves == x)
      return i;
  return std::nullopt;
}

std::optional<size_t> wait_graph::unanswering(rank_id rank) const {
  auto view = views_.find(rank);
  if (view == views_.end() || view->second.complete)
    return std::nullopt;
  for (size_t i = 0; i < nodes_.size(); ++i)
    if (auto& x = nodes_[i];
        x.rank == rank && x.what.executes && x.what.who == kind::schedule)
      return i;
  return std::nullopt;
}

std::optional<size_t> wait_graph::blocker(rank_id rank, const node& x) const {
  // Outside of a step, a user's thread waits for those of other ranks.
  auto meets = [&](const activity& y) {
    return (x.what.who == kind::main) == (y.who == kind::main)
           && !is_step_end(y);
  };
  std::optional<size_t> best;
  auto better = [&](size_t a, size_t b) {
    auto key = [&](const activity& y) {
      return std::tuple{y.executes, !is_step_end(y), meets(y),
                        y.who != kind::queued, y.seconds};
    };
    return key(nodes_[a].what) > key(nodes_[b].what);
  };
  for (size_t i = 0; i < nodes_.size(); ++i) {
    if (nodes_[i].rank != rank || &nodes_[i] == &x)
      continue;
    if (!best || better(i, *best))
      best = i;
  }
  return best;
}

const traffic* wait_graph::between(rank_id self, rank_id peer) const {
  auto i = views_.find(self);
  if (i == views_.end())
    return nullptr;
  for (auto& x : i->second.peers)
    if (x.peer == peer)
      return &x;
  return nullptr;
}

wait_graph::step wait_graph::successor(const node& x) const {
  auto& w = x.what;
  auto from = w.from == no_rank ? x.rank : w.from;
  if (silent_.count(from) > 0)
    return {std::nullopt, end::silent, from};
  if (from != x.rank) {
    if (auto t = between(x.rank, from); t != nullptr && t->queued > 0)
      return {std::nullopt, end::credits, from};
    if (w.asks.number != 0) {
      if (auto i = serving(from, w.asks))
        return {i, end::open, no_rank};
      // Where nobody says what is in line, or was sent, nothing is known to be
      // lost.
      for (auto rank : {from, x.rank})
        if (auto i = unanswering(rank))
          return {i, end::open, no_rank};
      return {std::nullopt, end::lost, from};
    }
    // The answer exists, but the other rank has no credits to send it.
    if (auto t = between(from, x.rank); t != nullptr && t->queued > 0)
      return {std::nullopt, end::credits, x.rank};
  }
  if (auto i = blocker(from, x))
    return {i, end::open, no_rank};
  return {};
}

wait_graph::chain wait_graph::follow(size_t first) const {
  chain result;
  for (auto next = std::optional{first}; next;) {
    auto seen = std::find(result.nodes.begin(), result.nodes.end(), *next);
    if (seen != result.nodes.end()) {
      result.how = end::cycle;
      result.cycle_begin = static_cast<size_t>(seen - result.nodes.begin());
      result.culprit = nodes_[*seen].rank;
      return result;
    }
    result.nodes.push_back(*next);
    auto& x = nodes_[*next];
    if (x.what.executes) {
      result.how = end::executing;
      result.culprit = x.rank;
      return result;
    }
    auto s = successor(x);
    result.how = s.how;
    result.culprit = s.culprit;
    next = s.next;
  }
  return result;
}

wait_graph::chain wait_graph::worst() const {
  std::optional<chain> best;
  auto key = [this](const chain& x) {
    auto& first = nodes_[x.nodes.front()].what;
    // A lost message first: all other waits may be a consequence of it. Then
    // the waits that say most in few words.
    auto rank = x.how == end::silent      ? 0
                : x.how == end::lost      ? 1
                : x.how == end::credits   ? 2
                : x.how == end::executing ? 3
                : x.how == end::cycle     ? 4
                                          : 5;
    // Waits for the culprit matter more than its own waits.
    auto own = x.how != end::cycle && nodes_[x.nodes.front()].rank == x.culprit;
    return std::tuple{rank,
                      is_step_end(first),
                      own,
                      first.who != kind::context,
                      first.who == kind::queued,
                      -first.seconds};
  };
  for (size_t i = 0; i < nodes_.size(); ++i) {
    if (nodes_[i].what.executes)
      continue;
    auto x = follow(i);
    if (!best || key(x) < key(*best))
      best = std::move(x);
  }
  return best.value_or(chain{});
}

// -- texts --------------------------------------------------------------------

std::string wait_graph::describe(const node& x) const {
  auto& w = x.what;
  auto who = fmt::format("rank {}", x.rank.value);
  auto time = seconds_text(w.seconds);
  if (w.executes && w.who == kind::schedule) // or it is not known since when
    return fmt::format("{}'s {}{}", who, w.what,
                       w.seconds > 0 ? " for " + time : "");
  if (w.executes)
    return fmt::format("{} executes {} for {}", who, w.what, time);
  auto from = w.from != no_rank && w.from != x.rank
                ? fmt::format(" from rank {}", w.from.value)
                : std::string{};
  if (w.who == kind::queued) // since when is not known
    return fmt::format("{} has {} in line, {}{}", who, w.what, w.waits_for,
                       from);
  if (w.who == kind::context && !w.what.empty())
    who += fmt::format(" ({})", w.what);
  return fmt::format("{} waits for {}{} for {}", who, w.waits_for, from, time);
}

std::string wait_graph::missing(const node& x, rank_id other) const {
  auto result = fmt::format("rank {} has nothing of it", other.value);
  auto lost = [&](rank_id from, rank_id to) {
    auto out = between(from, to);
    auto in = between(to, from);
    auto sent = out != nullptr ? out->sent : 0;
    auto taken = in != nullptr ? in->taken : 0;
    if (sent > taken)
      result += fmt::format(
        ": {} of {} messages from rank {} to rank {} did "
        "not arrive",
        sent - taken, sent, from.value, to.value);
  };
  lost(x.rank, other);
  // Messages leave when the device has computed them.
  for (auto& y : nodes_)
    if (y.rank == x.rank && y.what.who == kind::device)
      result += "; " + describe(y);
  lost(other, x.rank);
  return result;
}

/// Often a rank left out a call of the step, and then waits for the others
/// somewhere else, so that the chain is a cycle.
std::string wait_graph::missed_step(const chain& x) const {
  for (auto i : x.nodes) {
    auto& late = nodes_[i];
    auto caller = views_.find(late.what.serves.origin);
    auto view = views_.find(late.rank);
    if (late.what.of_later_step && caller != views_.end()
        && view != views_.end())
      return fmt::format(
        "rank {} is in step {}, but rank {} made {} and waits "
        "elsewhere: every rank has to call each step",
        caller->first.value, caller->second.step.value, late.rank.value,
        view->second.step.value);
  }
  return {};
}

std::string wait_graph::last_words(const chain& x) const {
  auto& last = nodes_[x.nodes.back()];
  if (x.how == end::cycle)
    if (auto missed = missed_step(x); !missed.empty())
      return missed;
  switch (x.how) {
    case end::silent:
      return fmt::format("rank {} has not answered for {} (stopped?)",
                         x.culprit.value, seconds_text(silent_.at(x.culprit)));
    case end::credits: {
      auto self = x.culprit == last.rank ? last.what.from : last.rank;
      return fmt::format(
        "{} messages of rank {} wait until rank {} takes "
        "earlier ones",
        between(self, x.culprit)->queued, self.value, x.culprit.value);
    }
    case end::lost:
      return missing(last, x.culprit);
    case end::cycle: {
      // Start at the lowest rank, so that one cycle always reads the same,
      // whichever of its waits was seen first.
      std::vector<uint64_t> ranks;
      for (auto i = x.cycle_begin; i < x.nodes.size(); ++i)
        ranks.push_back(nodes_[x.nodes[i]].rank.value);
      std::rotate(ranks.begin(), std::min_element(ranks.begin(), ranks.end()),
                  ranks.end());
      ranks.push_back(ranks.front());
      return fmt::format("cycle: rank {}", fmt::join(ranks, " -> rank "));
    }
    default:
      return {};
  }
}

std::string wait_graph::text(const chain& x) const {
  std::string result;
  auto add = [&result](const std::string& y) {
    if (!result.empty() && !y.empty())
      result += "; ";
    result += y;
  };
  for (auto i : x.nodes)
    add(describe(nodes_[i]));
  if (!x.nodes.empty())
    add(last_words(x));
  else
    for (auto& [rank, seconds] : silent_)
      add(fmt::format("rank {} has not answered for {} (stopped?)", rank.value,
                      seconds_text(seconds)));
  return result;
}

std::vector<std::string> wait_graph::lines() const {
  std::vector<std::string> result;
  for (auto& x : nodes_)
    result.push_back(describe(x));
  return result;
}

} // namespace smp
