#pragma once

#include "partition/partitioner.hpp"
#include "partition/schedule/program.hpp"
#include "partition/trace.hpp"
#include "runtime/base/random_stream.hpp"
#include "runtime/model/model_map.hpp"
#include "runtime/placement/checkpointing_decision.hpp"
#include "runtime/sharing/sharing.hpp"
#include "transport/error.hpp"

#include <ATen/core/ivalue.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>

namespace smp {

class rank_context;
class remote_parameters;

/// A user's model: a torch::nn module or the root of a TorchScript module
/// tree; the other is null.
struct model_root {
  std::shared_ptr<torch::nn::Module> module;
  c10::intrusive_ptr<c10::ivalue::Object> script;
};

/// The current model, with the places where its calls are intercepted.
walked_model walk_hooked(const model_root& x);

/// The user's settings for modules, by object, made before there was a model.
struct module_marks {
  /// Manual placement of modules without their own hook: a pp_rank.
  std::map<const void*, uint32_t> pins;
  /// Why modules are stateful.
  std::map<const void*, std::string> stateful;
  /// Whether tensor-parallel ranks should share them.
  std::map<const void*, sharing_mark> sharing;
  /// Parameters of which each tensor-parallel rank should hold a slice.
  std::vector<cut_mark> cuts;
  /// How backward recomputes them.
  std::map<const void*, activation_checkpointing> checkpointing;
};

/// The decision, and the input it was based on.
struct partition_decision {
  model_info model;
  partition_plan plan;
  /// Why the trace did not finish; empty if it did, or if there was none.
  std::string trace_failure = {};
  /// A trace measured what modules do.
  bool traced = false;
  /// Known times other than those of modules.
  program_times times = {};
  /// The modules that tensor-parallel ranks share.
  sharing_decision sharing = {};
  /// The modules that backward recomputes.
  checkpointing_decision checkpointing = {};

  /// As coloured text; see partition/print.hpp.
  /// @param all list the names of all modules that are shared, or not
  std::string text(bool all = false) const;
};

/// Decides where each module of a model lives, and places them there.
class partitioning {
public:
  /// All of them outlive this.
  partitioning(const rank_context& rank, const module_marks& marks,
               const model_root& root, model_map& map);

  /// Tells whether measuring would change the decision: there is a choice, the
  /// configuration does not forbid it, and the values are allocated. This
  /// differs between ranks: one of them must decide for all.
  bool wants_trace(uint64_t devices) const;

  /// Tells whether a trace could show how modules use results of other devices,
  /// even where that would not change the decision.
  bool can_trace(uint64_t devices) const;

  /// Runs `body`, the forward phase of a microbatch, to measure the cost of
  /// modules. On pp_rank 0, before `run`, which reports errors of this trace.
  /// @param prepare makes calls visible, after the model was walked again
  /// @param stream random numbers of the microbatch
  void trace(const std::function<void()>& prepare, random_stream stream,
             const std::function<void()>& body);

  /// @param default_device see `smp.default_partition`
  /// @param sharing what tensor-parallel ranks should share
  /// @returns the placement of modules on that many devices. On pp_rank 0.
  /// @throws error (config)
  partition_decision decide(uint32_t devices, uint64_t default_device,
                            const sharing_request& sharing) const;

  /// Calls `f` with the decision, on rank 0, which still has the whole model.
  void on_decision(std::function<void(const partition_decision&)> f) {
    on_decision_ = std::move(f);
  }

  /// Walks the model again: the user may have added modules since then.
  void rewalk();

  /// Compares the model with those of the other ranks, lets pp_rank 0 decide
  /// and informs hooks and map. Collective over the pipeline group.
  /// @throws error (config) naming the rank whose model differs
  void place();

  /// Frees the tensors that other ranks own (R14), and allocates this rank's
  /// on its device.
  void release(remote_parameters& others);

  /// Determines the modules that microbatches now pass in order (R19).
  void set_order();

  /// The decision; null before it, and on all ranks except pp_rank 0.
  const partition_decision* decision() const noexcept {
    return decision_ ? &*decision_ : nullptr;
  }

  /// The decision as coloured text; see partition/print.hpp.
  const std::string& text() const noexcept {
    return text_;
  }

  /// What a microbatch runs on each rank, as far as the partition tells.
  const pipeline_program& program() const noexcept {
    return program_;
  }

private:
  bool any_deferred() const;
  checkpointing_decision checkpointed() const;
  /// Orders modules that keep state, as the trace found, or for a reason.
  void keep_order_of(const trace_result& x) const;
  void declare(const std::map<uint32_t, std::string>& xs) const;
  void check_same_everywhere();

  const rank_context& rank_;
  const module_marks& marks_;
  const model_root& root_;
  model_map& map_;
  /// The trace result, or why there is none; for the model with this hash.
  std::optional<trace_result> trace_;
  failure trace_failure_;
  uint64_t traced_hash_ = 0;
  std::optional<partition_decision> decision_;
  std::function<void(const partition_decision&)> on_decision_;
  std::vector<shared_module> shared_;
  std::vector<cut_parameter> cut_;
  std::string text_;
  pipeline_program program_;
};

} // namespace smp
