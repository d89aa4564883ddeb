#pragma once

#include "partition/schedule.hpp"

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace smp {

class schedule_actor_type;

/// Table [smp.schedule]: schedules that a user made.
struct schedule_config {
  /// "list": what starts or turns around, one after the other.
  std::vector<task> list;
  /// "actor": a shared library, and the name of a schedule that it registers.
  std::string plugin;
  std::string name;
  /// "actor": what the schedule gets to read.
  std::string options;
  /// "actor": seconds that an answer may take.
  double timeout = 5;
};

/// Table [transport]: its stages are in docs/internals/communication.md.
struct device_path_config {
  /// Tensors in host memory take it too, for tests and measurements.
  bool force = false;
  /// Arenas of a rank that has a device path, in MB.
  uint64_t send_arena = 64;
  uint64_t receive_arena = 256;
  /// Of what is forced: so many ranks count as one node; 0: those of one
  /// machine.
  uint64_t ranks_per_node = 0;
};

/// The table [smp] of the configuration, and what a session needs besides
/// (docs: the table of keys in docs/config.md). Plain values; `validate` has
/// the rules that tie them together.
struct session_config {
  uint64_t pipeline_parallel_degree = 1;
  uint64_t microbatches = 1;
  /// "simple", "interleaved", "1f1b", "interleaved_1f1b", "list" or "actor".
  std::string pipeline = "interleaved";
  /// Default: see `default_active_microbatches` (R2).
  std::optional<uint64_t> active_microbatches = {};
  schedule_config schedule = {};
  /// For `pipeline` "actor", instead of `schedule.plugin`: see
  /// actors/schedule/schedule_actor.hpp.
  std::shared_ptr<const schedule_actor_type> schedule_actor = {};
  /// Segments of the model per rank.
  uint64_t chunks = 1;
  bool auto_partition = true;
  uint64_t default_partition = 0;
  /// "balanced" or "paper".
  std::string strategy = "balanced";
  /// alpha of the cost; default 0.8 for memory, 0.2 for speed.
  std::optional<double> memory_weight = {};
  std::string optimize = "memory";
  /// More ranks than the model has parts hold replicas of it.
  bool ddp = false;
  /// Replicas share the optimizer's state: each updates a part.
  bool shard_optimizer_state = false;
  /// And has the gradients of that part only.
  bool shard_gradients = false;
  /// Gradients that replicas average together, in MB.
  uint64_t bucket_cap_mb = 25;
  /// They are averaged while others are still computed, where that is safe.
  bool overlapping_allreduce = true;
  /// So many training steps add up their gradients before replicas average
  /// them. No key: a run updates after each step.
  uint64_t backward_passes_per_step = 1;
  /// Else the gradient of a step is the sum over its microbatches (R15). No
  /// key: the losses of a run are means.
  bool average_grads_across_microbatches = true;
  /// After each training step, replicas take the buffers of the first one.
  bool broadcast_buffers = false;
  /// Replicas that lend each other parts of some modules: of those whose names
  /// fit a pattern ("encoder.*") and none behind it that takes them away
  /// ("!encoder.layer.11"), and those that the code names.
  uint64_t tensor_parallel_degree = 1;
  std::vector<std::string> tensor_parallel_modules = {};
  /// Such replicas have the same samples: their batches are those of one.
  bool prescaled_batch = false;
  /// Modules, by name or pattern, that backward computes again instead of
  /// keeping their activations (runtime/session/activation_checkpointing.hpp).
  struct checkpointed_modules {
    std::vector<std::string> modules = {};
    std::string strategy = "each";
    bool preserve_rng_state = true;
  };
  checkpointed_modules activation_checkpointing = {};
  /// What checkpointed modules keep is in a file between forward and backward;
  /// so many calls ahead it is read back. Folder of the file; empty: TMPDIR, or
  /// /var/tmp (docs/activation_checkpointing.md).
  bool offload_activations = false;
  uint64_t activation_loading_horizon = 4;
  std::string offload_dir = {};
  /// Parameters and gradients in half precision, which optimizers update by
  /// float32 weights of their own (R56); at most one of them.
  bool bf16_params = false;
  bool fp16_params = false;
  std::string placement_strategy = "cluster";
  /// Where modules are measured before the partition: "cpu", "gpu" or "none".
  std::string trace_device = "cpu";
  bool trace_execution_times = true;
  bool trace_memory_usage = true;
  /// File with the times of modules, which are not measured then
  /// (runtime/session/module_times.hpp); empty: there is none.
  std::string times = {};
  /// Records the first `static_steps` steps and replays the fastest (R33).
  bool static_mode = false;
  uint64_t static_steps = 5;
  /// What a step does that diverges from its record: "error" or "dynamic".
  std::string static_fallback = "error";
  /// Remote calls return promises at once (R38 to R41). Default, "auto": a step
  /// in which a promise does not hold is taken back and run again.
  std::optional<bool> fast_mode = {};
  /// Modules, by name or pattern, whose remote calls wait for their results.
  std::vector<std::string> no_promises = {};
  /// All ranks serve in an order that does not depend on timing.
  bool deterministic_server = false;
  /// Seconds after which a long wait is reported (R7).
  double stall_timeout = 60;
  /// What a long wait does besides: "report" or "end".
  std::string on_stall = "report";
  uint64_t seed = 1;
  /// Kernel threads per rank; 0: cores / ranks on this machine, at least 1.
  uint64_t threads = 0;
  /// Non-loopback interfaces may be used although UCX's tcp has no
  /// authentication, and nothing is said of tcp over loopback.
  bool trusted_network = false;
  /// Microseconds that a thread which waits for messages looks for them again
  /// and again before it sleeps.
  uint64_t spin = 0;
  device_path_config device_path = {};
  /// What leads to the other machines, by name or address; empty: what leads
  /// to rank 0.
  std::string interface = {};
  /// Folder of the run's keys; a run over several machines wants them.
  std::string keys = {};
  /// Seconds without a sign of life until another machine is lost.
  double link_timeout = 15;
  /// Rank 0 shows the partition on stderr when it is made, if there is more
  /// than one place. No key: smp-train has an output of its own.
  bool print_partition = true;
};

/// Checks each value and what ties keys together: one that does nothing beside
/// the others has to have its default.
/// @throws error (config) naming the keys, one line for each error
void validate(const session_config& x);

/// @returns `x` with the defaults of all keys that do nothing beside the
/// others, for who changes what a user wrote
session_config without_idle_keys(session_config x);

/// @returns `active_microbatches` or, if not set, its default in a step of
///          `microbatches` (R2).
uint64_t effective_active_microbatches(const session_config& x,
                                       uint64_t microbatches);

/// @returns how many children of a Sequential a strategy of activation
/// checkpointing computes again together, 0 for as many as there are; nothing
/// if there is no such strategy
std::optional<uint64_t> checkpointed_together(std::string_view strategy);

/// @returns `memory_weight` or, if not set, what `optimize` stands for.
double effective_memory_weight(const session_config& x);

} // namespace smp
