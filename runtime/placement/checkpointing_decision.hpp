#pragma once

#include "runtime/model/model_map.hpp"
#include "runtime/model/partition_notes.hpp"
#include "runtime/placement/checkpointing_options.hpp"
#include "transport/ids.hpp"

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace smp {

/// The checkpointing that user code and the configuration request.
struct checkpointing_request {
  /// By object.
  const std::map<const void*, activation_checkpointing>& marked;
  std::vector<std::string> patterns; // see `module_list`
  activation_checkpointing how;
};

/// A module that is recomputed, or a Sequential whose children are.
struct checkpointing_choice {
  module_id module;
  bool children = false;
  /// Number of children in a region; 0: all on one rank.
  uint64_t group = 1;
  bool same_numbers = true;
  /// Children that are not recomputed.
  std::vector<uint32_t> left_out = {};
};

struct checkpointing_decision {
  std::vector<checkpointing_choice> chosen;
  /// For the partition print.
  partition_notes remarks;
};

/// @param stateful why modules have state invisible to smp, by object
/// @throws error (config) naming a module that cannot be recomputed, a pattern
/// that matches no module or excludes nothing, or a strategy without any
/// Sequential
checkpointing_decision
decide_checkpointing(const walked_model& model, const checkpointing_request& x,
                     const std::map<const void*, std::string>& stateful);

/// @param owners by module
/// @returns the argument for `model_map::recompute`
std::vector<recomputation>
regions_of(const walked_model& model,
           const std::vector<checkpointing_choice>& chosen,
           const std::vector<rank_id>& owners);

template <class Inspector>
bool inspect(Inspector& f, checkpointing_choice& x) {
  return f.object(x).fields(
    f.field("module", x.module), f.field("children", x.children),
    f.field("group", x.group), f.field("same_numbers", x.same_numbers),
    f.field("left_out", x.left_out));
}

} // namespace smp
