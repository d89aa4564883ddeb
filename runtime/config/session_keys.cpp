#include "runtime/config/config_keys.hpp"

namespace smp {

namespace {

const std::vector<config_key> session_table = {
  // -- [smp] ------------------------------------------------------------------
  {.name = "smp.pipeline_parallel_degree",
   .slot = SMP_SLOT(smp.pipeline_parallel_degree),
   .meaning = "ranks among which the model is divided",
   .range = degree,
   .aliases = {"smp.partitions"},
   .elsewhere = {"pipeline_parallel_size", "pipeline_model_parallel_size",
                 "pp_size", "pp", "pp_degree", "num_stages", "stages"}},
  {.name = "smp.microbatches",
   .slot = SMP_SLOT(smp.microbatches),
   .meaning = "microbatches per step; must divide `data.batch_size`",
   .range = degree,
   .elsewhere = {"num_microbatches", "gradient_accumulation_steps", "chunks",
                 "micro_batches"}},
  {.name = "smp.pipeline",
   .slot = SMP_SLOT(smp.pipeline),
   .meaning = "schedule: `simple` runs all forward phases before the first "
              "backward phase; `interleaved` prefers backward phases; `1f1b` "
              "turns microbatches around in their order; `interleaved_1f1b` "
              "is for several `smp.chunks`; `list` does what "
              "`smp.schedule.list` "
              "says, `actor` what a plug-in decides (docs/schedules.md)",
   .choices = {"simple", "interleaved", "1f1b", "interleaved_1f1b", "list",
               "actor"},
   .elsewhere = {"pipeline_schedule", "schedule"}},
  {.name = "smp.active_microbatches",
   .slot = SMP_SLOT(smp.active_microbatches),
   .meaning = "bound on microbatches between forward and backward; with "
              "`simple` and `list` not less than `smp.microbatches`",
   .fallback = "degree + 3; `interleaved_1f1b`: 2 degree + 2; both 1 where a "
               "rank has the whole model; `simple`, `list`: all",
   .range = degree,
   .elsewhere = {"max_inflight", "inflight_microbatches"}},
  {.name = "smp.chunks",
   .slot = SMP_SLOT(smp.chunks),
   .meaning = "parts of the model per rank, each between parts of other ranks: "
              "a smaller bubble for more messages",
   .range = between(1, 4096),
   .elsewhere = {"virtual_pipeline_model_parallel_size", "num_model_chunks",
                 "virtual_pipeline_degree", "vpp"}},
  {.name = "smp.auto_partition",
   .slot = SMP_SLOT(smp.auto_partition),
   .meaning = "place modules by cost; `false`: only as the code and "
              "`smp.manual_partition` say"},
  {.name = "smp.default_partition",
   .slot = SMP_SLOT(smp.default_partition),
   .meaning = "where modules go that nobody placed, without "
              "`smp.auto_partition`",
   .range = between(0, 65535)},
  {.name = "smp.manual_partition",
   .slot = SMP_SLOT(manual_partition),
   .meaning = "modules, by name, and the device of each with all below it: "
              "`{ \"blocks.0\" = 1 }`",
   .range = between(0, 65535),
   .elsewhere = {"device_map", "partition", "set_partition"}},
  {.name = "smp.strategy",
   .slot = SMP_SLOT(smp.strategy),
   .meaning = "`paper`: exactly the paper's decision; `balanced`: may only "
              "improve on it",
   .choices = {"balanced", "paper"},
   .only = {{"smp.auto_partition", {"true"}}}},
  {.name = "smp.optimize",
   .slot = SMP_SLOT(smp.optimize),
   .meaning = "what the partition is to balance, if `smp.memory_weight` does "
              "not say it; of transformer layers that tensor-parallel ranks "
              "share, whether they keep no activation twice or exchange less "
              "(docs/tensor_parallel.md)",
   .choices = {"memory", "speed"}},
  {.name = "smp.memory_weight",
   .slot = SMP_SLOT(smp.memory_weight),
   .meaning = "weight of memory against time in a module's cost",
   .fallback = "0.8; `speed`: 0.2",
   .range = between(0, 1),
   .elsewhere = {"alpha"},
   .only = {{"smp.auto_partition", {"true"}}}},
  {.name = "smp.trace_device",
   .slot = SMP_SLOT(smp.trace_device),
   .meaning = "where the first step measures modules before the partition; "
              "`auto`: where the rank computes; `none`: costs are guessed from "
              "sizes",
   .choices = {"auto", "cpu", "gpu", "none"},
   .elsewhere = {"trace_execution_times", "trace_memory_usage"}},
  {.name = "smp.times",
   .slot = SMP_SLOT(smp.times),
   .meaning = "file with the times of modules, which the first step does not "
              "measure then: `times.json` of an earlier run, or what "
              "`smp-train partition --json` wrote; relative to the "
              "configuration's directory (docs/partition.md)",
   .fallback = "times are measured",
   .elsewhere = {"module_times", "profile"},
   .is_file = true},
  {.name = "smp.ddp",
   .slot = SMP_SLOT(smp.ddp),
   .meaning = "ranks beyond `smp.pipeline_parallel_degree` hold replicas of "
              "the model, which train on data of their own and average their "
              "gradients (docs/data_parallel.md)",
   .elsewhere = {"data_parallel", "dp"}},
  {.name = "smp.ranks",
   .slot = SMP_SLOT(ranks),
   .meaning = "ranks to start, all replicas together: a multiple of "
              "their product (also `--ranks`)",
   .fallback = "`smp.pipeline_parallel_degree` times "
               "`smp.tensor_parallel_degree`",
   .range = between(1, 65536),
   .elsewhere = {"data_parallel_size", "world_size", "nproc_per_node"},
   .only = {{"smp.ddp", {"true"}}},
   .local = true},
  {.name = "smp.placement_strategy",
   .slot = SMP_SLOT(smp.placement_strategy),
   .meaning = "order of the ranks along the axes D (replicas), P (pipeline) "
              "and T (tensor parallel); those of the last letter are "
              "neighbours; `cluster` = `DPT`, `spread` = `TPD`",
   .choices = {"cluster", "spread", "DPT", "DTP", "PDT", "PTD", "TDP", "TPD"},
   .only = {{"smp.ddp", {"true"}}}},
  {.name = "smp.static_mode",
   .slot = SMP_SLOT(smp.static_mode),
   .meaning = "record the first steps and replay the order of the fastest; "
              "for models whose flow does not depend on data"},
  {.name = "smp.static_steps",
   .slot = SMP_SLOT(smp.static_steps),
   .meaning = "steps to record, for each kind of step",
   .range = between(1, 1000),
   .only = {{"smp.static_mode", {"true"}},
            {"smp.deterministic_server", {"false"}}}},
  {.name = "smp.deterministic_server",
   .slot = SMP_SLOT(smp.deterministic_server),
   .meaning = "all ranks serve in an order that does not depend on timing: "
              "the same seed gives the same bits"},
  {.name = "smp.device",
   .slot = SMP_SLOT(smp.device),
   .meaning = "where modules compute: `cpu`, `cuda`, or a device that a "
              "library registered; `auto`: `cuda` where there is an NVIDIA "
              "driver for CUDA 13.0 or later with a GPU, else `cpu`. A rank "
              "takes the GPU local rank modulo count (docs/devices.md)",
   .elsewhere = {"accelerator"}},
  {.name = "smp.wait_for_device",
   .slot = SMP_SLOT(smp.wait_for_device),
   .meaning = "a rank waits for its device after each module, so that an error "
              "of the device names the module that made it; slow, for finding "
              "such an error",
   .elsewhere = {"CUDA_LAUNCH_BLOCKING"}},
  {.name = "smp.seed",
   .slot = SMP_SLOT(smp.seed),
   .meaning = "seed of initial parameters and of dropout",
   .elsewhere = {"random_seed", "manual_seed"}},
  {.name = "smp.threads",
   .slot = SMP_SLOT(smp.threads),
   .meaning = "threads per rank for tensor operations; 0: one for each "
              "usable core, or as many as the control group (container) may "
              "use, shared with the other ranks on this machine",
   .range = between(0, 4096),
   .elsewhere = {"num_threads", "omp_num_threads"},
   .local = true},
  {.name = "smp.fast_mode",
   .slot = SMP_SLOT(smp.fast_mode),
   .meaning = "calls of modules on other ranks return at once where earlier "
              "calls tell what they return; a result is fetched when "
              "something touches it (docs/modes.md); `auto`: a step in "
              "which a call returns something else is run again, `true`: "
              "that is an error"},
  {.name = "smp.no_promises",
   .slot = SMP_SLOT(smp.no_promises),
   .meaning = "modules, by name as in `tensor_parallel.modules`, whose calls "
              "wait for their results all the same",
   .only = {{"smp.fast_mode", {"auto", "true"}}}},
  {.name = "smp.tensor_parallel_degree",
   .slot = SMP_SLOT(smp.tensor_parallel_degree),
   .meaning = "replicas that share some modules, of which each holds a slice "
              "(docs/tensor_parallel.md)",
   .range = between(1, 65536),
   .elsewhere = {"tensor_parallel_size", "tensor_model_parallel_size",
                 "tp_size", "tp", "tp_degree"},
   .only = {{"smp.ddp", {"true"}}}},
  {.name = "smp.prescaled_batch",
   .slot = SMP_SLOT(smp.prescaled_batch),
   .meaning = "replicas that share modules have the same samples, so that none "
              "are gathered for these modules (docs/tensor_parallel.md)",
   .only = {{"smp.ddp", {"true"}}}},
  {.name = "smp.shard_optimizer_state",
   .slot = SMP_SLOT(smp.shard_optimizer_state),
   .meaning = "each replica updates a part of the parameters, and keeps the "
              "optimizer's state for that part only (docs/data_parallel.md)",
   .elsewhere = {"zero", "zero_stage", "zero_optimization",
                 "use_distributed_optimizer"},
   .only = {{"smp.ddp", {"true"}}}},
  {.name = "smp.shard_gradients",
   .slot = SMP_SLOT(smp.shard_gradients),
   .meaning = "each replica also keeps the gradients of that part only "
              "(docs/data_parallel.md)",
   .elsewhere = {"zero2", "reduce_scatter"},
   .only = {{"smp.shard_optimizer_state", {"true"}}}},
  {.name = "smp.bucket_cap_mb",
   .slot = SMP_SLOT(smp.bucket_cap_mb),
   .meaning = "gradients that replicas average together, in MB",
   .range = between(1, 65536),
   .elsewhere = {"allreduce_bucket_size", "reduce_bucket_size",
                 "ddp_bucket_size", "bucket_size_mb"},
   .only = {{"smp.ddp", {"true"}}}},
  {.name = "smp.overlapping_allreduce",
   .slot = SMP_SLOT(smp.overlapping_allreduce),
   .meaning = "replicas average gradients while others are still computed, "
              "where that is safe, and share updates while the next step runs; "
              "`false`: at the end of the step and of the update",
   .elsewhere = {"overlap_comm", "overlap_grad_reduce"},
   .only = {{"smp.ddp", {"true"}}}},
  {.name = "smp.broadcast_buffers",
   .slot = SMP_SLOT(smp.broadcast_buffers),
   .meaning = "after each training step all replicas take the buffers of the "
              "first one; else each keeps its own",
   .only = {{"smp.ddp", {"true"}}}},
  {.name = "smp.bf16_params",
   .slot = SMP_SLOT(smp.bf16_params),
   .meaning = "parameters, buffers and gradients are bfloat16, which the "
              "optimizer updates by float32 weights of its own "
              "(docs/precision.md)",
   .elsewhere = {"bf16_enabled", "param_dtype"}},
  {.name = "smp.fp16_params",
   .slot = SMP_SLOT(smp.fp16_params),
   .meaning = "the same with float16",
   .elsewhere = {"fp16_enabled", "half"}},
  {.name = "smp.offload_optimizer",
   .slot = SMP_SLOT(smp.offload_optimizer),
   .meaning = "the state of the optimizer is in host memory, and the update is "
              "computed there; changes nothing for a rank on the CPU, where it "
              "is so anyway (docs/devices.md)",
   .elsewhere = {"cpu_offload", "offload_optimizer_device"}},
  {.name = "smp.offload_activations",
   .slot = SMP_SLOT(smp.offload_activations),
   .meaning = "what modules of `activation_checkpointing.modules` keep for "
              "backward is in a file in between "
              "(docs/activation_checkpointing.md)",
   .elsewhere = {"activation_offload", "cpu_checkpointing"}},
  {.name = "smp.activation_loading_horizon",
   .slot = SMP_SLOT(smp.activation_loading_horizon),
   .meaning = "how many calls of these modules ahead of backward it is read "
              "back; at most as many wait to be written",
   .range = between(1, 65536),
   .only = {{"smp.offload_activations", {"true"}}}},
  {.name = "smp.offload_dir",
   .slot = SMP_SLOT(smp.offload_dir),
   .meaning = "folder of that file, in which it has no name, relative to the "
              "configuration's directory; on a disk: a tmpfs is memory",
   .fallback = "the environment's `TMPDIR`, or `/var/tmp`",
   .elsewhere = {"nvme_path", "offload_path"},
   .only = {{"smp.offload_activations", {"true"}}},
   .local = true,
   .is_folder = true},
  // -- [tensor_parallel] ------------------------------------------------------
  {.name = "tensor_parallel.modules",
   .slot = SMP_SLOT(smp.tensor_parallel_modules),
   .meaning = "modules to share, by name, each with all below it; `*` stands "
              "for anything, and `!` takes away what the entries before it "
              "name: `[\"encoder.*\", \"!encoder.layer.11\"]`",
   .only = {{"smp.ddp", {"true"}}}},
  {.name = "tensor_parallel.register",
   .slot = SMP_SLOT(smp.tensor_parallel_register),
   .meaning = "classes of a TorchScript file that compute what a module of "
              "torch.nn does, by their names in Python: "
              "`[\"my_package.layers.MyLinear as Linear\"]`; with hooks: "
              "`smp::tp_register` (docs/tensor_parallel.md)",
   .elsewhere = {"tp_register", "tp_register_with_module"},
   .only = {{"smp.ddp", {"true"}}}},
  // -- [activation_checkpointing] ---------------------------------------------
  {.name = "activation_checkpointing.modules",
   .slot = SMP_SLOT(smp.activation_checkpointing.modules),
   .meaning = "modules that backward computes again instead of keeping their "
              "activations, by name; `*` and `!` as in "
              "`tensor_parallel.modules`: `[\"transformer.h.*\"]`; of a "
              "Sequential, its children (docs/activation_checkpointing.md)",
   .elsewhere = {"gradient_checkpointing", "recompute"}},
  {.name = "activation_checkpointing.strategy",
   .slot = SMP_SLOT(smp.activation_checkpointing.strategy),
   .meaning = "which children of a Sequential on one rank are computed again "
              "together: `each`: each by itself, `contiguous`: all "
              "consecutive ones, `group_2`, `group_3`, ...: that many at a "
              "time"},
  {.name = "activation_checkpointing.preserve_rng_state",
   .slot = SMP_SLOT(smp.activation_checkpointing.preserve_rng_state),
   .meaning = "what is computed again draws the random numbers of the first "
              "time; `false`: others"},
  // -- [smp.schedule] ---------------------------------------------------------
  {.name = "smp.schedule.list",
   .slot = SMP_SLOT(smp.schedule.list),
   .meaning = "every microbatch and phase once, e.g. `[[0, \"forward\"], [0, "
              "\"backward\"]]`; steps of another number of microbatches "
              "(evaluation) repeat it or run a part of it",
   .required = true,
   .only = {{"smp.pipeline", {"list"}}}},
  {.name = "smp.schedule.plugin",
   .slot = SMP_SLOT(smp.schedule.plugin),
   .meaning = "shared library with schedules, relative to the configuration's "
              "directory",
   .required = true,
   .only = {{"smp.pipeline", {"actor"}}},
   .is_file = true},
  {.name = "smp.schedule.name",
   .slot = SMP_SLOT(smp.schedule.name),
   .meaning = "a schedule that the library registers",
   .required = true,
   .only = {{"smp.pipeline", {"actor"}}}},
  {.name = "smp.schedule.options",
   .slot = SMP_SLOT(smp.schedule.options),
   .meaning = "what that schedule gets to read",
   .only = {{"smp.pipeline", {"actor"}}}},
};

} // namespace

std::span<const config_key> session_keys() {
  return session_table;
}

} // namespace smp
