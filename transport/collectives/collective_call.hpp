#pragma once

// What a rank says of a collective, to its own side and to the others.

#include "transport/collectives/elements.hpp"
#include "transport/inspect.hpp"

#include <compare>
#include <memory>
#include <string>
#include <vector>

namespace smp {

enum class collective_kind : uint8_t {
  allreduce,
  reduce,
  reduce_scatter,
  allgather,
  all_to_all,
  broadcast,
  scatter,
  gather,
  barrier,
};

constexpr collective_kind last_of(collective_kind) noexcept {
  return collective_kind::barrier;
}

const char* to_string(collective_kind x) noexcept;

/// Calls with the same label are one collective, in whatever order ranks reach
/// them.
struct collective_label {
  /// Ascending, the calling rank among them.
  std::vector<rank_id> group;
  std::string name;
  /// 0: outside of steps.
  step_id step;
  microbatch_id microbatch;
  phase what = phase::forward;
  /// Counts the calls that agree in all of the above.
  uint64_t number = 0;

  auto operator<=>(const collective_label&) const = default;
};

/// What all ranks of the group have to say alike.
struct collective_signature {
  collective_kind kind = collective_kind::barrier;
  reduce_op op = reduce_op::sum;
  element_type type = element_type::uint8;
  /// Position in the group; 0 where the kind has none.
  uint64_t root = 0;
  /// Of what one rank gives (reduce_scatter, scatter: of what one rank takes;
  /// all_to_all: of what goes from one rank to one other, or of one row if
  /// ranks give each other different numbers of them).
  std::vector<int64_t> shape;
  /// all_to_all of different sizes: the rows for each rank, by position.
  std::vector<uint64_t> rows;
  /// reduce: every rank is the root of such calls, of about as many bytes, so
  /// that none has time to help another.
  bool every_root = false;

  /// @returns "sum allreduce of float32[4, 8]".
  std::string describe() const;

  /// Elements of `shape`.
  uint64_t count() const noexcept;
};

/// What a rank wants of a collective.
struct collective_call {
  collective_label label; // its number is given at the start
  collective_signature what;
  /// Of different sizes: the rows that are expected of each rank.
  std::vector<uint64_t> rows_taken;
  /// Contiguous, in host memory, by the position of the rank where there is
  /// something for each of them. May be `output` where one rank gives as much
  /// as it takes.
  const void* input = nullptr;
  void* output = nullptr;
  /// Keeps both; shared with messages that are on their way.
  std::shared_ptr<const void> owner;
  /// Said where ranks give other sizes; may be empty.
  std::string advice = {};
  /// Whose call it is, for who looks: the path of a module.
  std::string place = {};

  /// @returns "allreduce "loss" of ranks 0, 1".
  std::string describe() const;

  /// @throws error (config, unsupported) for what can never work
  void check(rank_id self) const;
};

// -- fields -------------------------------------------------------------------

template <class Inspector>
bool inspect(Inspector& f, collective_label& x) {
  return f.object(x).fields(
    f.field("group", x.group), f.field("name", x.name), f.field("step", x.step),
    f.field("microbatch", x.microbatch), f.field("phase", x.what),
    f.field("number", x.number));
}

template <class Inspector>
bool inspect(Inspector& f, collective_signature& x) {
  return f.object(x).fields(f.field("kind", x.kind), f.field("op", x.op),
                            f.field("type", x.type), f.field("root", x.root),
                            f.field("shape", x.shape), f.field("rows", x.rows),
                            f.field("every_root", x.every_root));
}

/// @returns how the two ranks differ, as a text that names both, or nothing.
/// @param from,to positions in the group of whom they are
std::string difference(const collective_label& label,
                       const collective_signature& theirs, uint64_t from,
                       const collective_call& mine, uint64_t to);

} // namespace smp
