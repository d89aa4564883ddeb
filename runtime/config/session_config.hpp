#pragma once

#include "partition/schedule/schedule.hpp"

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace smp {

class schedule_actor_type;

/// Table [smp.schedule]: user-defined schedules.
struct schedule_config {
  /// "list": the forward and backward phases to start, in this order.
  std::vector<task> list;
  /// "actor": a shared library, and the name of a schedule that it registers.
  std::string plugin;
  std::string name;
  /// "actor": text that is passed to the schedule.
  std::string options;
};

/// The device path (docs/internals/communication.md) without devices, for tests
/// and measurements. No configuration keys.
struct device_path_config {
  /// Tensors in host memory use it, too.
  bool force = false;
  /// Arenas of a rank that has a device path, in MB.
  uint64_t send_arena = 64;
  uint64_t receive_arena = 256;
  /// With `force`: this many ranks count as one node; 0: the ranks
  /// of one machine do.
  uint64_t ranks_per_node = 0;
};

/// The table [smp] of the configuration, and everything else that a session
/// needs (docs: the table of keys in docs/config.md). Plain values; `validate`
/// checks the rules between them.
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
  /// Ranks beyond the parts of the model hold replicas of it.
  bool ddp = false;
  /// Replicas shard the optimizer's state: each updates one part.
  bool shard_optimizer_state = false;
  /// Each replica also keeps the gradients of its part only.
  bool shard_gradients = false;
  /// Size of a bucket of gradients that replicas average together, in MB.
  uint64_t bucket_cap_mb = 25;
  /// Buckets are averaged while others are computed, where that is safe.
  bool overlapping_allreduce = true;
  /// This many training steps accumulate gradients before replicas average
  /// them. Not a configuration key: a run updates after each step.
  uint64_t backward_passes_per_step = 1;
  /// If false, the gradient of a step is the sum over its microbatches (R15).
  /// Not a configuration key: the losses of a run are means.
  bool average_grads_across_microbatches = true;
  /// After each training step, all replicas copy the buffers of the first.
  bool broadcast_buffers = false;
  /// Number of replicas that shard some modules among them: modules whose names
  /// match a pattern ("encoder.*") that no later pattern excludes
  /// ("!encoder.layer.11"), and modules that the code marks.
  uint64_t tensor_parallel_degree = 1;
  std::vector<std::string> tensor_parallel_modules = {};
  /// Classes of TorchScript files that compute what a module of torch.nn does:
  /// "my_package.layers.MyLinear as Linear".
  std::vector<std::string> tensor_parallel_register = {};
  /// Such replicas get the same samples: together they have one batch.
  bool prescaled_batch = false;
  /// Modules, by name or pattern, that backward recomputes instead of keeping
  /// their activations (runtime/session/activation_checkpointing.hpp).
  struct checkpointed_modules {
    std::vector<std::string> modules = {};
    std::string strategy = "each";
    bool preserve_rng_state = true;
  };
  checkpointed_modules activation_checkpointing = {};
  /// The kept inputs of checkpointed modules are in a file between forward and
  /// backward, and are read back this many calls ahead. Folder of the file;
  /// empty: TMPDIR, or /var/tmp (docs/activation_checkpointing.md).
  bool offload_activations = false;
  uint64_t activation_loading_horizon = 4;
  std::string offload_dir = {};
  /// Parameters and gradients in half precision, which optimizers update from
  /// float32 weights of their own (R56); at most one of the two.
  bool bf16_params = false;
  bool fp16_params = false;
  /// The state of optimizers is in host memory, where they update copies of the
  /// parameters; on a rank without a device it is there anyway.
  bool offload_optimizer = false;
  std::string placement_strategy = "cluster";
  /// Where modules compute: "cpu", "cuda", or a device that was registered
  /// (runtime/device/accelerator.hpp). "auto": "cuda" where it can be used,
  /// else "cpu".
  std::string device = "auto";
  /// After each module, so that an error of the device names it.
  bool wait_for_device = false;
  /// Where modules are measured before the partition: "cpu", "gpu" or "none".
  /// "auto": where the rank computes.
  std::string trace_device = "auto";
  /// File with the execution times of modules, which are then not measured
  /// (runtime/placement/module_times.hpp); empty: there is none.
  std::string times = {};
  /// Records the first `static_steps` steps and replays the fastest (R33).
  bool static_mode = false;
  uint64_t static_steps = 5;
  /// Remote calls return promises at once (R38 to R41). Default, "auto": a step
  /// in which a promise does not hold is rolled back and run again.
  std::optional<bool> fast_mode = {};
  /// Modules, by name or pattern, whose remote calls wait for their results.
  std::vector<std::string> no_promises = {};
  /// All ranks serve in an order that does not depend on timing.
  bool deterministic_server = false;
  /// Seconds after which a long wait is reported (R7).
  double stall_timeout = 60;
  /// What follows a report of a long wait: "report" goes on, "end" ends.
  std::string on_stall = "report";
  /// Steps whose trace is written to the run directory, from 1: "10", or
  /// "10-12"; empty: none.
  std::string trace = {};
  uint64_t seed = 1;
  /// Kernel threads per rank; 0: its share of the cores that it and the other
  /// ranks on this machine may use, at least 1.
  uint64_t threads = 0;
  /// Allows non-loopback interfaces although UCX's tcp has no authentication,
  /// and suppresses the warning about tcp over loopback.
  bool trusted_network = false;
  /// Microseconds that a thread waiting for messages polls for
  /// them before it sleeps.
  uint64_t spin = 0;
  device_path_config device_path = {};
  /// The interface towards the other machines, by name or address; empty: the
  /// one that leads to rank 0.
  std::string interface = {};
  /// Folder of the run's keys; a run over several machines needs them.
  std::string keys = {};
  /// Seconds of silence after which another machine counts as lost.
  double link_timeout = 15;
  /// Rank 0 prints the partition to stderr when it is made, if there is more
  /// than one place. Not a configuration key: smp-train has its own output.
  bool print_partition = true;
};

/// Checks each value and the rules between keys: a key that has no effect
/// beside the others must have its default.
/// @throws error (config) naming the keys, one line for each error
void validate(const session_config& x);

/// @returns the first and the last step of "10-12" or "10"; {0, 0} for an empty
/// text, nothing if it is no such text
std::optional<std::pair<uint64_t, uint64_t>>
parse_traced_steps(const std::string& x);

/// @returns `x` with each key that has no effect beside the others set to its
/// default, for code that changes what a user wrote
session_config without_idle_keys(session_config x);

/// @returns `active_microbatches` or, if not set, its default in a step of
///          `microbatches` (R2).
uint64_t effective_active_microbatches(const session_config& x,
                                       uint64_t microbatches);

/// @returns how many children of a Sequential a strategy of activation
/// checkpointing recomputes together, 0 for as many as there are; nullopt if
/// there is no such strategy
std::optional<uint64_t> checkpointed_together(std::string_view strategy);

/// @returns both names of an entry of `tensor_parallel_register`; nullopt if it
/// is something else
std::optional<std::pair<std::string, std::string>>
class_and_type(std::string_view entry);

/// @returns `memory_weight` or, if not set, what `optimize` stands for.
double effective_memory_weight(const session_config& x);

} // namespace smp
