#pragma once

#include "runtime/base/named_tensors.hpp"
#include "runtime/intercept/trace/traced_model_call.hpp"
#include "runtime/model/hook.hpp"
#include "runtime/replicas/comm_hook.hpp"
#include "runtime/session/session.hpp"

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace torch::nn {
class Module;
} // namespace torch::nn

namespace smp {

class rank_runtime;
class model_state;
struct model_root;

/// The part of `distributed_model<M>` that does not depend on M.
class distributed_model_base {
public:
  /// Takes a model; only the caller knows its call signature.
  explicit distributed_model_base(std::shared_ptr<torch::nn::Module> root);
  explicit distributed_model_base(model_root root);

  /// Virtual because trainers own models through this base.
  virtual ~distributed_model_base();

  distributed_model_base(const distributed_model_base&) = delete;
  distributed_model_base& operator=(const distributed_model_base&) = delete;

  // -- training ---------------------------------------------------------------

  /// Ends the forward phase of a microbatch: waits until the schedule
  /// grants its backward phase, then runs it across ranks. Inside a step
  /// body only. Gradients are averaged over microbatches: the seed is 1 /
  /// microbatches times `grad`, or times 1 for a scalar `loss` (R15), times
  /// the loss scale (`optimizer_options`); without
  /// `average_grads_across_microbatches` gradients are summed, not
  /// averaged.
  /// @param keep_graph another backward of this body uses the same graph
  void backward(const at::Tensor& loss, const at::Tensor& grad = {},
                bool keep_graph = false);

  /// The same for several outputs together.
  void backward(const std::vector<at::Tensor>& outputs,
                const std::vector<at::Tensor>& grads, bool keep_graph = false);

  /// Training or evaluation mode of all modules; call it on all ranks.
  void train(bool on = true);

  void eval() {
    train(false);
  }

  // -- data parallelism -------------------------------------------------------

  /// While alive, steps accumulate gradients without averaging them; the first
  /// step after it averages the accumulated gradients.
  class no_sync_scope {
  public:
    explicit no_sync_scope(std::shared_ptr<model_state> x);

    ~no_sync_scope();

    no_sync_scope(const no_sync_scope&) = delete;
    no_sync_scope& operator=(const no_sync_scope&) = delete;

  private:
    std::shared_ptr<model_state> state_;
  };

  /// Call on all ranks, or on none.
  [[nodiscard]] no_sync_scope no_sync() {
    return no_sync_scope{state_};
  }

  /// Sets how gradients travel between replicas from the next step on; all
  /// ranks must make the same choice.
  void register_comm_hook(comm_hook x);

  /// The same with a function of your own.
  /// @throws error (unsupported) with `smp.shard_gradients`, where no replica
  /// has the whole mean
  void register_comm_hook(bucket_hook x);

  // -- partition --------------------------------------------------------------

  /// Partitions now instead of at the first step. Module costs are then
  /// estimated from sizes: measuring them needs the inputs of a step.
  /// Collective: call it on all ranks, or on none.
  void partition();

  bool partitioned() const;

  /// The partition as text; empty before the partition.
  /// @param colour one colour per device, for a terminal
  /// @param all on rank 0: include all modules, and why tensor-parallel ranks
  /// do not share modules that they could share
  std::string partition_text(bool colour = false, bool all = false) const;

  /// The modules that microbatches pass in order because they change state
  /// (R19), one per line; after the first training step only those that did.
  std::string order_text() const;

  /// Calls `f` after the partition, or at once if it has happened.
  void register_post_partition_hook(std::function<void()> f);

  // -- what this rank owns (everything before the partition)
  // -------------------

  /// Paths of the modules, "" for the root.
  std::vector<std::string> local_module_names() const;
  /// For a torch::nn model; empty for a TorchScript one.
  std::vector<std::shared_ptr<torch::nn::Module>> local_modules() const;
  std::vector<std::pair<std::string, std::shared_ptr<torch::nn::Module>>>
  local_named_modules() const;
  std::vector<at::Tensor> local_parameters() const;
  named_tensors local_named_parameters() const;
  std::vector<at::Tensor> local_buffers() const;

  /// Copies of the parameters and buffers that this rank owns.
  named_tensors local_state_dict() const;

  // -- the whole model --------------------------------------------------------

  /// Copies of all parameters and buffers, in model order; shared tensors once,
  /// under their first name. Collective over the ranks that hold the model;
  /// every rank gets all of them.
  named_tensors state_dict() const;

  /// The same for gradients, without the loss scale, sparse ones as dense;
  /// parameters without a gradient are omitted. With `shard_gradients`,
  /// collective over all ranks.
  named_tensors gradients() const;

  /// Loads values; each rank copies those it owns. Not collective.
  /// @throws error (config) listing all names that are missing, unknown, of
  /// another shape or not a plain tensor, before changing anything
  void load_state_dict(const named_tensors& xs);

  model_state& state() const noexcept {
    return *state_;
  }

private:
  named_tensors gather(const char* what, bool gradients) const;

  std::shared_ptr<rank_runtime> rank_;
  std::shared_ptr<model_state> state_;
};

namespace detail {

/// A copy of an argument that one call may change before another gets it.
inline at::Tensor fresh(const at::Tensor& x) {
  return x.defined() ? x.clone() : x;
}

inline at::Tensor fresh(at::Tensor& x) {
  return fresh(std::as_const(x));
}

template <class T>
T& fresh(T& x) {
  return x;
}

} // namespace detail

/// The user's model, of which each rank will own a part. M is a module holder
/// (`TORCH_MODULE`). Every rank constructs the same model from the same random
/// numbers.
template <class M>
class distributed_model : public distributed_model_base {
public:
  explicit distributed_model(M model)
    : distributed_model_base(model.ptr()), model_(std::move(model)) {
    // nop
  }

  /// Calls the model's forward, inside a step body.
  template <class... Ts>
  decltype(auto) operator()(Ts&&... xs) {
    traced_model_call call;
    if constexpr (requires { model_->forward(detail::fresh(xs)...); })
      while (call.again())
        model_->forward(detail::fresh(xs)...);
    return model_->forward(std::forward<Ts>(xs)...);
  }

  auto* operator->() {
    return model_.get();
  }

  auto& operator*() {
    return *model_;
  }

  M& module() noexcept {
    return model_;
  }

private:
  M model_;
};

/// Places `x` and all modules below it on a pp_rank (manual placement); before
/// the partition.
/// @throws error (unsupported) after the partition
void set_partition(torch::nn::Module& x, uint32_t pp_rank);

/// Sets whether tensor-parallel ranks share `x` and the modules below it
/// (docs/tensor_parallel.md); before the partition, at least on rank 0.
/// @param how for a shared module: its own, or that of the nearest ancestor
/// @throws error (config) if it is invalid or has no effect; (unsupported)
/// after the partition
void set_tensor_parallelism(torch::nn::Module& x, bool enabled = true,
                            const tensor_parallel_config& how = {});

namespace nn {

/// How a `parameter_creation_scope` creates parameters, with the option names
/// of the paper.
struct parameter_creation_options {
  /// True: the module uses each slice for the samples of all tensor-parallel
  /// ranks, so the gradient covers that many batches. False: it covers one
  /// batch, as in a module that computes like Megatron's, where all ranks have
  /// the same samples (`smp.prescaled_batch`).
  bool scaled_batch = true;
  /// A floating-point type that replaces the one they were created with.
  std::optional<at::ScalarType> dtype = {};
  /// Draws their values from a normal distribution around 0 instead of keeping
  /// the values they were created with.
  bool use_normal = false;
  /// Standard deviation of that distribution.
  double initializer_range = 0.02;
};

/// Each tensor-parallel rank keeps its slice of the parameters that a module
/// registers while this is alive: in the module's constructor, which creates
/// them whole. A rank that owns the module cuts them at the partition, so the
/// initial values of the model do not depend on the number of ranks, and state
/// dicts hold whole parameters. The module itself must compute with its peers
/// (tp/functions.hpp), and give the same results on one rank.
class parameter_creation_scope {
public:
  /// @param dim the axis along which parameters are cut
  /// @throws error (config) naming an invalid option
  explicit parameter_creation_scope(torch::nn::Module& x, int64_t dim = 0,
                                    const parameter_creation_options& how = {});

  /// Applies the options to the parameters. Those that are not floating-point
  /// keep their types and values.
  ~parameter_creation_scope();

  parameter_creation_scope(const parameter_creation_scope&) = delete;
  parameter_creation_scope& operator=(const parameter_creation_scope&) = delete;

protected:
  /// @param axes parameters with fewer axes stay whole
  parameter_creation_scope(torch::nn::Module& x, int64_t dim, int64_t axes,
                           const parameter_creation_options& how);

private:
  torch::nn::Module& module_;
  int64_t dim_;
  int64_t axes_;
  parameter_creation_options how_;
  size_t before_; // parameters
};

/// Cuts weights [out, in, ...] along the input axis. A bias [out] stays whole:
/// it is added to the sum over the ranks.
class initialize_with_input_partition : public parameter_creation_scope {
public:
  explicit initialize_with_input_partition(
    torch::nn::Module& x, const parameter_creation_options& how = {})
    : parameter_creation_scope(x, 1, 2, how) {
    // nop
  }
};

/// Cuts weights [out, in, ...] and biases [out] along the axis of the output
/// channels.
class initialize_with_output_partition : public parameter_creation_scope {
public:
  explicit initialize_with_output_partition(
    torch::nn::Module& x, const parameter_creation_options& how = {})
    : parameter_creation_scope(x, 0, how) {
    // nop
  }
};

} // namespace nn

/// Declares that `x` changes state that smp cannot see, such as a counter that
/// is a member of its class: microbatches then pass it in order. Buffers need
/// no declaration. Before the partition, on every rank.
/// @param why for the partition print: "counts its calls"
/// @throws error (unsupported) after the partition
void set_stateful(torch::nn::Module& x, std::string why);

} // namespace smp
