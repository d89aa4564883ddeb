#pragma once

// Which rank waits for which, and which is to blame. No actors, no clocks.

#include "actors/protocol/rank_view.hpp"

#include <map>
#include <optional>
#include <string>
#include <vector>

namespace smp {

/// A stalled run looks the same on every rank: all of them wait. What helps is
/// the end of the chain of waits: something that has executed for long, a rank
/// that does not answer, a message that never came, or a cycle.
class wait_graph {
public:
  /// How a chain of waits ends.
  enum class end : uint8_t {
    executing, // something executes
    silent,    // the rank does not answer
    credits,   // messages are queued until a rank takes earlier ones
    lost,      // no rank has what is waited for
    cycle,     // a cycle of waits
    open,      // unknown
  };

  struct chain {
    /// Indices into `nodes()`; in a cycle the last node waits for the one at
    /// `cycle_begin`.
    std::vector<size_t> nodes;
    end how = end::open;
    size_t cycle_begin = 0;
    rank_id culprit = no_rank;
  };

  struct node {
    rank_id rank;
    activity what;
  };

  /// @param views of the ranks that answered
  /// @param silent seconds since the last answer of each of the others
  wait_graph(std::vector<rank_view> views, std::map<rank_id, double> silent);

  const std::vector<node>& nodes() const noexcept {
    return nodes_;
  }

  /// Tells whether any node waits.
  bool waiting() const;

  /// Follows the waits, starting at one node.
  chain follow(size_t first) const;

  /// @returns the most informative chain; without nodes if none waits.
  chain worst() const;

  /// @returns one line: "rank 0 waits for module b, microbatch 0, forward, from
  /// rank 1 for 61 s; rank 1 executes module b, microbatch 0, forward, for
  /// 61 s".
  std::string text(const chain& x) const;

  /// @returns one line per node.
  std::vector<std::string> lines() const;

private:
  struct step {
    std::optional<size_t> next;
    end how = end::open;
    rank_id culprit = no_rank;
  };

  step successor(const node& x) const;
  std::optional<size_t> serving(rank_id rank, request_id x) const;
  /// @returns the actors of a rank, if they do not answer
  std::optional<size_t> unanswering(rank_id rank) const;
  /// @returns the node on `rank` that most likely keeps `x` waiting.
  std::optional<size_t> blocker(rank_id rank, const node& x) const;
  const traffic* between(rank_id from, rank_id to) const;
  std::string describe(const node& x) const;
  std::string last_words(const chain& x) const;
  std::string missed_step(const chain& x) const;
  std::string missing(const node& x, rank_id other) const;

  std::vector<node> nodes_;
  std::map<rank_id, rank_view> views_; // without their activities
  std::map<rank_id, double> silent_;
};

} // namespace smp
