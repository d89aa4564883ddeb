#pragma once

// Partition decisions without training.

#include "partition/print.hpp"
#include "runtime/config/config_file.hpp"
#include "runtime/placement/partitioning.hpp"
#include "runtime/process/control_group.hpp"
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
  std::string json; // for tools, see runtime/placement/partition_json.hpp
  /// Why the trace did not finish; empty if it did or none ran. Gradients are
  /// off in a trace, so a run may get further.
  std::string failure = {};
  /// Why the first held-out microbatch fails in evaluation mode; empty if it
  /// does not, or could not be tried.
  std::string evaluation = {};
};

/// Partitions the tree in a file (docs/partition.md).
/// @param options only number of devices, memory weight and strategy are used
/// @throws error (config) naming what is wrong with the file
printed_plan plan_tree(const std::string& path, partition_options options);

/// @returns what each device of the decision needs, on the first of the ranks
/// that share modules
std::vector<memory_need> needs_of(const walked_model& model,
                                  const partition_decision& decision,
                                  const train_config& x);

/// A partition decision with the session and whole model it was made from.
struct lone_decision {
  session& of; // of the rank that decides
  model_state& state;
  trainable& whole;
  partition_decision decision;

  const walked_model& model() const;
};

/// Bytes of activations that microbatches keep on each device.
struct activation_need {
  /// The peak if the schedule runs as simulated.
  std::vector<uint64_t> predicted = {};
  /// The peak in any order: with `smp.active_microbatches` in flight.
  std::vector<uint64_t> bound = {};
  /// Why both are unknown; empty if they are known.
  std::string unknown = {};
};

/// Runs the forward phase of the first microbatch with gradients
/// (`measure_kept`) and simulates the schedule. Offloaded arguments do not
/// count, except those on their way to or from the file. Modules that ranks
/// share run as on the first of these ranks (`assumed_peers`).
activation_need activations_of(lone_decision& run, const train_config& x);

/// The same at the start of a run. Also unknown where measuring might take more
/// memory than training or change its numbers: for a plug-in's model that was
/// not traced before, and for a TorchScript file, whose first calls decide how
/// it is compiled.
activation_need activations_at_start(lone_decision& run, const train_config& x);

/// @param xs by device
/// @param here what this machine lets its processes have
/// @returns a table of needs, activations included, a line on activations, and
/// a warning if all ranks together need more host memory than they may have
/// here
std::string needs_text(const std::vector<memory_need>& xs,
                       const activation_need& activations,
                       const train_config& x,
                       const control_group& here = read_control_group());

/// @param which microbatch
/// @throws error (user_code)
[[noreturn]] void fail_on_microbatch(const train_config& x,
                                     const std::string& which,
                                     const std::string& why);

/// Computes the loss of the first microbatch in this process alone.
/// @param why the trace failed
/// @throws error (user_code) with `why` if that fails, too
void try_first_microbatch(const train_config& x, const std::string& why);

/// Decides as the first step of a run would, without training and in this
/// process alone: makes the model, measures the first microbatch, partitions.
/// @param use is called with the decision, in the session of the only rank
/// @throws error (config) naming what is wrong with model, data, placement or
/// the file of train.init_from
void decide_alone(const train_config& x,
                  const std::function<void(lone_decision&)>& use);

/// @returns that decision as text
/// @param all see `partition_decision::text`
printed_plan plan_model(const train_config& x, bool all = false);

} // namespace smp
