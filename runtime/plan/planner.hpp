#pragma once

// Decisions without training.

#include "partition/print.hpp"
#include "runtime/config/config_file.hpp"
#include "runtime/session/partitioning.hpp"
#include "runtime/train/memory_need.hpp"
#include "runtime/train/trainable.hpp"

#include <functional>
#include <string>
#include <vector>

namespace smp {

class model_state;
class session;

/// A decision as text.
struct printed_plan {
  std::string text; // for people, with colours
  std::string json; // for tools, see runtime/plan/partition_json.hpp
  /// Why the trace did not come to its end, if there was one; gradients are
  /// off in it, so a run may get further.
  std::string failure = {};
};

/// Partitions the tree in a file (docs/partition.md).
/// @param options number of devices, memory weight and strategy count
/// @throws error (config) naming what is wrong with the file
printed_plan plan_tree(const std::string& path, partition_options options);

/// @returns what each device of the decision needs, on the first of the ranks
/// that share modules
std::vector<memory_need> needs_of(const walked_model& model,
                                  const partition_decision& decision,
                                  const train_config& x);

/// What was decided, where the whole model is, and with what.
struct lone_decision {
  session& of; // of the rank that decides
  model_state& state;
  trainable& whole;
  partition_decision decision;

  const walked_model& model() const;
};

/// What microbatches keep of activations on each device; bytes.
struct activation_need {
  /// At most, if the schedule goes as it was played.
  std::vector<uint64_t> predicted = {};
  /// The same whatever comes first: of `smp.active_microbatches`.
  std::vector<uint64_t> bound = {};
  /// Why that is not known; else empty.
  std::string unknown = {};
};

/// Runs the forward phase of the first microbatch with gradients
/// (`measure_kept`) and plays the schedule. Arguments in a file do not count,
/// but for those on their way. Modules that ranks share run as on the first of
/// these (`assumed_peers`).
activation_need activations_of(lone_decision& run, const train_config& x);

/// The same in a run that begins. Unknown also where measuring might take more
/// memory than training, or change its numbers: of a plug-in's model that was
/// not traced before, and of a TorchScript file, whose first calls decide how
/// it is compiled.
activation_need activations_at_start(lone_decision& run, const train_config& x);

/// @param xs by device
/// @returns a table of what devices need, activations too, and a line on these
std::string needs_text(const std::vector<memory_need>& xs,
                       const activation_need& activations,
                       const train_config& x);

/// Computes the loss of the first microbatch in this process alone.
/// @throws error (user_code) if that fails
void try_first_microbatch(const train_config& x);

/// Decides as the first step of a run would, without training and in this
/// process alone: makes the model, measures the first microbatch, partitions.
/// @param use gets the decision, in the session of the only rank
/// @throws error (config) naming what is wrong with model, data, placement or
/// the file of train.init_from
void decide_alone(const train_config& x,
                  const std::function<void(lone_decision&)>& use);

/// @returns that decision as text
/// @param all see `partition_decision::text`
printed_plan plan_model(const train_config& x, bool all = false);

} // namespace smp
