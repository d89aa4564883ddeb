#pragma once

// The whole configuration of smp-train: a TOML file, overridden by the command
// line. docs/config.md lists the keys; runtime/config/config_schema.hpp is the
// table behind both.

#include "runtime/config/session_config.hpp"

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace smp {

/// Table [model]. docs/config.md lists the sizes that each model has,
/// and their defaults.
struct model_config {
  std::string type;
  uint64_t layers = 4;
  /// "t5"; default: `layers`.
  std::optional<uint64_t> decoder_layers;
  uint64_t heads = 4;
  uint64_t width = 256;
  /// "t5": width of a head; default: `width` / `heads`.
  std::optional<uint64_t> head_size;
  /// Default: 4 times `width`.
  std::optional<uint64_t> feed_forward;
  /// "t5": the feed-forward part of version 1.1.
  bool gated = false;
  /// Longest sequence in tokens; default: `data_config::sequence_length`.
  std::optional<uint64_t> sequence_length;
  /// Number of different tokens; default: 256, one per byte.
  std::optional<uint64_t> vocabulary;
  /// "bert", "roberta".
  std::optional<uint64_t> segments;
  double dropout = 0;
  std::optional<double> norm_eps;
  std::optional<bool> tied;
  /// "gpt": "gpt-2" or "gpt-3".
  std::string variant = "gpt-2";
  /// "gpt-3": tokens that a banded block sees.
  uint64_t window = 256;
  /// "t5": biases of its attention, and the distance of the last one.
  uint64_t relative_buckets = 32;
  uint64_t relative_distance = 128;
  /// "moe": number of experts, and the weight of their imbalance in the loss.
  uint64_t experts = 4;
  double balance_loss = 0.01;
  /// "ncf".
  uint64_t users = 256;
  uint64_t items = 256;
  /// "mlp".
  uint64_t inputs = 32;
  uint64_t outputs = 10;
  /// "torchscript": the file, and libraries with operators that it uses.
  std::string path;
  std::vector<std::string> operator_libraries;
  /// "plugin": a shared library and the name of a model in it.
  std::string library;
  std::string name;
  /// Table [model.options]: handed to that model as written, strings without
  /// their quotes.
  std::map<std::string, std::string> options;
};

/// Table [data].
struct data_config {
  /// "text" (bytes of a file), "tokens" (integers of a file), "safetensors"
  /// (rows of tensors in a file, or in those of a folder) or "synthetic" (no
  /// file).
  std::string type;
  /// Relative to the directory of the file that sets it, or on the command line
  /// to the current directory; made absolute by `read_config`.
  std::string path;
  uint64_t sequence_length = 0;
  /// Samples per step and data-parallel rank; "safetensors": default: all rows
  /// of the file, the same in each step.
  std::optional<uint64_t> batch_size;
  /// Integer type of "tokens" in the file: "uint16" or "uint32".
  std::string dtype = "uint16";
  uint64_t shuffle_seed = 1;
  /// Fraction at the end of the data that is kept for evaluation.
  double held_out = 0.1;
};

/// Table [optimizer.schedule]: the learning rate over the steps.
struct lr_schedule_config {
  /// "constant", "linear" or "cosine".
  std::string type = "constant";
  /// Steps in which the rate first rises linearly from 0 to `lr`.
  uint64_t warmup_steps = 0;
  /// Rate at the last step of "linear" and "cosine".
  double final_lr = 0;
};

/// A number, or "dynamic".
struct loss_scale_setting {
  bool dynamic = false;
  double fixed = 1;
};

/// Table [optimizer.dynamic_loss_args], see `dynamic_loss_args`.
struct dynamic_loss_config {
  double init_scale = 65536;
  double scale_factor = 2;
  uint64_t scale_window = 1000;
  double min_scale = 1;
};

/// Table [optimizer]. Options that are not set keep LibTorch's defaults.
struct optimizer_config {
  /// "sgd", "adam", "adamw" or "adagrad".
  std::string type = "adamw";
  double lr = 1e-3;
  std::array<double, 2> betas = {0.9, 0.999};
  std::optional<double> eps;
  std::optional<double> weight_decay;
  double momentum = 0;
  /// Bound on the norm of the whole gradient; default: no clipping.
  std::optional<double> clip_grad_norm;
  /// Updates in one pass over the memory.
  bool fused = false;
  /// Default: "dynamic" if anything is computed in float16, else 1.
  std::optional<loss_scale_setting> loss_scale;
  dynamic_loss_config dynamic_loss_args;
  /// Decay of the moving averages of weights; default: no averages.
  std::optional<double> ema_decay;
  lr_schedule_config schedule;
};

/// Table [train].
struct train_loop_config {
  uint64_t steps = 0;
  /// File with the initial parameters and buffers; empty: those that the model
  /// is created with. Path as in `data_config::path`.
  std::string init_from;
  /// With which the names in that file begin, and those of the model do not.
  std::string init_prefix;
  /// Steps between progress lines that are not overwritten.
  uint64_t log_interval = 10;
  /// Steps between evaluations; 0: only one, after the last step.
  uint64_t eval_interval = 0;
  /// Batches per evaluation; 0: no evaluation.
  uint64_t eval_steps = 10;
  /// Characters to generate after the last step.
  uint64_t sample = 0;
  std::string dtype = "float32";
  /// Steps, counted from 1, whose whole gradient is written to a file.
  std::vector<uint64_t> dump_gradients;
  bool save_model = false;
  /// "stop" or "skip".
  std::string on_nonfinite = "stop";
  /// How often the launcher starts the ranks again.
  uint64_t max_restarts = 0;
  /// Whether replicas that are left go on without a machine that is lost.
  bool elastic = false;
};

/// Table [checkpoint].
struct checkpoint_config {
  /// Where checkpoints go; empty: none are saved.
  std::string dir;
  /// Steps between two checkpoints.
  uint64_t interval = 100;
  /// Number of newest checkpoints to keep.
  uint64_t keep = 2;
  /// "auto": the newest complete checkpoint in `dir`, if any; "none"; or the
  /// path of a checkpoint.
  std::string resume = "auto";
  bool on_interrupt = true;
  /// A signal that saves and goes on: "SIGUSR1", "SIGUSR2" or "none".
  std::string signal = "SIGUSR1";
  /// Seconds that the launcher then waits for the ranks to end.
  uint64_t interrupt_grace = 30;
};

/// Of table [monitor], what smp-inspect serves beside the run; the rest is in
/// `smp`.
struct monitor_config {
  std::string web;        // HOST:PORT of the page; empty: none
  std::string prometheus; // HOST:PORT of the metrics; empty: none
};

/// A configuration, checked. [transport] trusted_network is in `smp`.
struct train_config {
  session_config smp{.print_partition = false};
  /// smp.ranks: number of ranks that smp-train starts, in all replicas.
  std::optional<uint64_t> ranks;
  /// smp.manual_partition: device of each listed module, by name.
  std::map<std::string, uint64_t> manual_partition;
  model_config model;
  data_config data;
  optimizer_config optimizer;
  train_loop_config train;
  checkpoint_config checkpoint;
  /// monitor.tensorboard: writes event files, too.
  bool tensorboard = false;
  monitor_config monitor;
  /// Where each key was set: "quickstart.toml:12"; a default has none. Not a
  /// configuration key.
  std::map<std::string, std::string> origins;
  /// Ranks are threads of one process. Not a configuration key: tests want it.
  bool threads_as_ranks = false;
};

/// @returns how many ranks smp-train starts.
inline uint64_t ranks_of(const train_config& x) {
  return x.ranks.value_or(x.smp.pipeline_parallel_degree
                          * x.smp.tensor_parallel_degree);
}

/// @returns how many ranks have the same modules, or parts of them.
inline uint64_t dp_size_of(const train_config& x) {
  return ranks_of(x) / x.smp.pipeline_parallel_degree;
}

/// @returns how many replicas share each batch.
inline uint64_t replicas_of(const train_config& x) {
  return dp_size_of(x)
         / (x.smp.prescaled_batch ? x.smp.tensor_parallel_degree : 1);
}

/// Result of `read_config`. `config` is meaningful if `errors` is empty.
struct config_report {
  train_config config;
  /// One line each: "FILE:LINE: what is wrong; what to write instead".
  std::vector<std::string> errors;
  /// The same for what has no effect, but can be meant.
  std::vector<std::string> warnings = {};
};

/// Reads `path` and applies `overrides` on top ("--table.key=value", dashes
/// optional; "--ranks=N" sets smp.ranks with `smp.ddp`, else the pipeline
/// degree). Finds all errors, not only the first; never throws for a bad file.
/// @param world ranks that another launcher has started: this many hold
/// replicas, unless the configuration gives a number
config_report read_config(const std::string& path,
                          const std::vector<std::string>& overrides = {},
                          std::optional<uint64_t> world = {});

/// Same for text in memory; `name` stands for the file in errors, and relative
/// paths stay as they are.
config_report parse_config(const std::string& text, const std::string& name,
                           const std::vector<std::string>& overrides = {},
                           std::optional<uint64_t> world = {});

/// The settings of a program that trains a model of its own: no key has to be
/// set.
/// @param text as of a file; may be empty
/// @param name stands for it in errors
/// @param settings "KEY=VALUE", on top of it
/// @param place stands for those in errors
/// @param world ranks of the run
/// @throws error (config) with all errors, one per line
train_config program_config(const std::string& text, const std::string& name,
                            const std::vector<std::string>& settings,
                            const std::string& place, uint64_t world);

/// Same as `read_config`. @throws error (config) with all errors, one per line
train_config load_config(const std::string& path,
                         const std::vector<std::string>& overrides = {});

/// @returns `x` with every default filled in that follows from other keys; only
/// `clip_grad_norm` may still be empty
train_config effective(train_config x);

/// Settings that differ between ranks make the run hang or give wrong numbers.
/// @returns a line "KEY = VALUE" for each effective value that must be equal on
/// all ranks; files with the same meaning give the same text
std::string shared_settings(const train_config& x);

/// Same for the configuration that a user's program gives its session.
std::string shared_settings(const session_config& x);

/// @returns TOML that `read_config` reads back to the same configuration;
/// defaults are written out, those that follow from other keys as comments
/// @param with_origins comments say where each key was set
std::string to_toml(const train_config& x, bool with_origins = false);

/// @returns the part of docs/config.md between its markers: one table of keys
/// per TOML table (Markdown).
std::string config_reference();

} // namespace smp
