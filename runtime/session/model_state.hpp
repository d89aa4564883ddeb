#pragma once

#include "actors/protocol/request.hpp"
#include "partition/program.hpp"
#include "partition/trace.hpp"
#include "runtime/model/module_order.hpp"
#include "runtime/model/module_walk.hpp"
#include "runtime/base/random_stream.hpp"
#include "transport/wait.hpp"

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

namespace smp {

class engine;
class execution;
class script_program;
enum class request_kind : uint8_t;

/// A user's model: a torch::nn module or the root of a TorchScript module
/// tree; the other is null.
struct model_root {
  std::shared_ptr<torch::nn::Module> module;
  c10::intrusive_ptr<c10::ivalue::Object> script;
};

/// What was decided, and from what.
struct partition_decision {
  model_info model;
  partition_plan plan;

  /// For people, with colours; see partition/print.hpp.
  std::string text() const;
};

/// The model of a session: where each module and tensor lives. Without a
/// partition everything is here.
class model_state {
public:
  model_state(engine& eng, model_root root);

  /// Calls of the modules run here again; placeholders stay placeholders.
  ~model_state();

  model_state(const model_state&) = delete;
  model_state& operator=(const model_state&) = delete;

  // -- partition --------------------------------------------------------------

  /// Tells whether measuring would change the decision: there is something to
  /// decide, the configuration does not forbid it, and the values are here.
  /// That differs between ranks: one has to decide for all.
  bool wants_trace(uint64_t devices) const;

  /// Runs `body`, the forward phase of a microbatch, to find out what modules
  /// cost; for `partition`. On pp_rank 0.
  /// @param stream random numbers of the microbatch
  void trace(random_stream stream, const std::function<void()>& body);

  /// @returns where modules would go on so many devices. On pp_rank 0.
  /// @throws error (config)
  partition_decision decide(uint32_t devices) const;

  /// Walks, compares with the other ranks, lets pp_rank 0 decide, and releases
  /// what this rank does not own (R14). Collective over the pipeline group;
  /// does nothing the second time.
  /// @throws error (config) naming the rank whose model differs
  void partition();

  bool partitioned() const noexcept {
    return partitioned_;
  }

  /// What was decided; null before the partition, and on all ranks but
  /// pp_rank 0.
  const partition_decision* decision() const noexcept {
    return decision_ ? &*decision_ : nullptr;
  }

  /// Calls `f` after the partition, or at once.
  void on_partition(std::function<void()> f);

  /// The decision for people, with colours; see partition/print.hpp.
  const std::string& text() const noexcept {
    return text_;
  }

  /// What a microbatch does on which rank, as far as the partition tells.
  const pipeline_program& program() const noexcept {
    return program_;
  }

  // -- properties -------------------------------------------------------------

  /// Training or evaluation mode of all modules on this rank.
  void train(bool on);

  /// What TorchScript code is made of; null for a torch::nn model, and before
  /// the partition.
  const script_program* script() const noexcept {
    return script_.get();
  }

  const walked_model& model() const noexcept {
    return model_;
  }

  /// Which modules microbatches pass in their order (R19).
  const module_order& order() const noexcept {
    return order_;
  }

  /// Tells whether calls of a module on this rank wait for their turn.
  bool keeps_order(module_id x) const;

  rank_id owner(module_id x) const {
    return owners_.at(x.value);
  }

  /// @param x position in `model().tensors`
  rank_id tensor_owner(uint32_t x) const;

  bool owned(uint32_t tensor) const {
    return tensor_owner(tensor) == self_;
  }

  const std::string& name(module_id x) const {
    return model_.modules.at(x.value).names.front();
  }

  const std::string& tensor_name(uint32_t x) const {
    return model_.tensors.at(x).names.front();
  }

  /// Tells whether the bytes of `x` are those of a parameter or buffer of this
  /// rank, which another microbatch may write (R13).
  bool shares_state(const at::Tensor& x) const;

  // -- remote parameters (R14) -----------------------------------------------

  /// The value of a tensor of another rank, as a copy whose gradient goes to
  /// its owner. Parameters are fetched once per step, buffers each time. (In
  /// steps that are replayed with promises once per execution: which one comes
  /// first is a matter of timing there.)
  /// Parks; only inside a step.
  at::Tensor fetch(uint32_t tensor);

  /// Gives a buffer of another rank a new value. Parks; only inside a step.
  void store(uint32_t tensor, const at::Tensor& x);

  /// A view of a fetched copy may be written into when nobody looks: `flush`
  /// compares the bits and takes changes to the owner.
  /// @param copy what `fetch` returned
  void lend(uint32_t tensor, const at::Tensor& copy);

  /// Settles what the calling execution was lent: before it asks anything of
  /// another rank, and before it ends. Parks if something changed.
  /// @throws error (unsupported) if the copy of a parameter was changed
  void flush();

  /// A module put another tensor into the slot of a buffer: it is the same
  /// buffer from now on.
  void rebind(const at::Tensor& from, const at::Tensor& to);

  // -- steps ------------------------------------------------------------------

  void begin_step();

  /// Forgets the copies of remote parameters; learns from the first steps
  /// which modules need no order. Collective.
  void end_step(bool complete);

private:
  void rewalk();
  bool any_deferred() const;
  void rewrite_script();
  void set_order();
  void check_same_everywhere();
  void place();
  void release();
  module_id home(uint32_t tensor) const;
  execution& executing(uint32_t tensor) const;
  call ask(request_kind op, uint32_t tensor, const char* what) const;

  struct copy {
    std::shared_ptr<awaited<at::Tensor>> value;
    at::Tensor known; // once it is here
    uint32_t version = 0;
  };

  engine& engine_;
  rank_id self_;
  model_root root_;
  walked_model model_;
  std::unique_ptr<script_program> script_;
  module_order order_;
  bool partitioned_ = false;
  /// What the trace found, or why there is none; of the model with this hash.
  std::optional<trace_result> trace_;
  failure trace_failure_;
  uint64_t traced_hash_ = 0;
  std::optional<partition_decision> decision_;
  std::vector<rank_id> owners_; // by module
  std::string text_;
  pipeline_program program_;
  std::unordered_set<const void*> storages_; // of owned tensors
  /// Of parameters of other ranks: what takes their gradients there.
  std::vector<std::shared_ptr<torch::autograd::Node>> gradients_;
  std::vector<std::function<void()>> hooks_;
  std::mutex copies_mutex_;
  /// By tensor and, where each execution has its own, that execution.
  std::map<std::pair<uint32_t, request_id>, copy> copies_;
};

} // namespace smp
