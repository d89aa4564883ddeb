#pragma once

// What a rank states about a collective call, locally and to its peers.

#include "transport/collectives/elements.hpp"
#include "transport/inspect.hpp"
#include "transport/tensor_ref.hpp"

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

/// Calls with the same label form one collective, in whatever order the ranks
/// reach them.
struct collective_label {
  /// Ascending; includes the calling rank.
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

/// What all ranks of the group must agree on.
struct collective_signature {
  collective_kind kind = collective_kind::barrier;
  reduce_op op = reduce_op::sum;
  element_type type = element_type::uint8;
  /// Position in the group; 0 if the kind has no root.
  uint64_t root = 0;
  /// Shape of what one rank gives (reduce_scatter, scatter: of what one rank
  /// takes; all_to_all: of what one rank sends to one peer, or of one row if
  /// the numbers of rows differ between peers).
  std::vector<int64_t> shape;
  /// all_to_all with uneven sizes: the rows for each rank, by position.
  std::vector<uint64_t> rows;
  /// reduce: every rank is the root of such a call, of about as many bytes, so
  /// no rank has time to help another one.
  bool every_root = false;
  /// Every rank has its tensors on its device; else in host memory.
  bool on_device = false;

  /// @returns "sum allreduce of float32[4, 8]".
  std::string describe() const;

  /// Elements of `shape`.
  uint64_t count() const noexcept;
};

/// A collective as one rank calls it.
struct collective_call {
  collective_label label; // its number is assigned at the start
  collective_signature what;
  /// all_to_all with uneven sizes: the rows expected from each rank.
  std::vector<uint64_t> rows_taken;
  /// Contiguous; where each rank has a part, the parts are
  /// ordered by position. May be the same as `output` where one rank gives as
  /// much as it takes.
  const void* input = nullptr;
  void* output = nullptr;
  /// Where both are.
  device_ref device = {};
  /// When the device may read and write them; null: now.
  std::shared_ptr<device_event> ready = {};
  /// Keeps both alive; shared with messages in flight.
  std::shared_ptr<const void> owner;
  /// Added to the error if shapes differ between ranks; may be empty.
  std::string advice = {};
  /// The path of the module that makes the call, for reports.
  std::string place = {};

  /// @returns "allreduce "loss" of ranks 0, 1".
  std::string describe() const;

  /// @throws error (config, unsupported) for a call that can never work
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
  return f.object(x).fields(
    f.field("kind", x.kind), f.field("op", x.op), f.field("type", x.type),
    f.field("root", x.root), f.field("shape", x.shape), f.field("rows", x.rows),
    f.field("every_root", x.every_root), f.field("on_device", x.on_device));
}

/// @returns a text that names both ranks and how they differ, or an empty one.
/// @param from,to group positions of the ranks of `theirs` and `mine`
std::string difference(const collective_label& label,
                       const collective_signature& theirs, uint64_t from,
                       const collective_call& mine, uint64_t to);

} // namespace smp
