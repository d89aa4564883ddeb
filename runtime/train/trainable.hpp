#pragma once

// What a configuration trains, and on what. A training loop, a check and a
// comparison with one process need the same model, with the same first values
// and the same batches, but must not know which kind of model it is, nor may
// the comparison see anything of the pipeline (R36).

#include "runtime/base/named_tensors.hpp"
#include "runtime/train/data.hpp"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace torch::nn {
class Module;
} // namespace torch::nn

namespace smp {

class distributed_model_base;
struct train_config;

/// A model together with its loss. As made it is an ordinary model of this
/// process: `loss(x).backward()` trains it without a session. `distribute`
/// hands it to the current session; after the partition the same `loss`,
/// inside a step body, runs across ranks.
class trainable {
public:
  virtual ~trainable();

  /// Each tensor once, under its first name. Meaningful before a partition.
  virtual named_tensors named_parameters() const = 0;
  virtual named_tensors named_buffers() const = 0;

  /// The modules' first paths by their identity, as a `call_observer` hears of
  /// it; nothing if calls cannot be observed.
  virtual std::unordered_map<const void*, std::string> module_paths() const;

  /// Without a session, lets a `call_observer` hear of the calls that smp would
  /// intercept after a partition.
  /// @returns false if other code runs for it from now on, so that this model
  ///          no longer proves anything about the one that was made
  virtual bool make_observable();

  /// Without a session, lets a `call_observer` hear that these calls begin and
  /// end, where `make_observable` would run other code; the code that was made
  /// goes on to run.
  virtual void mark_calls();

  /// Training or evaluation mode of all modules.
  virtual void train(bool on) = 0;

  /// @param tensors how many a batch has
  /// @throws error (config) if these cannot be the model's
  virtual void check_inputs(size_t tensors) const;

  /// x: the tensors of a batch, or of a microbatch, in the order of the data
  /// source @returns a scalar: the mean over the (micro)batch
  /// @throws error (config) if these are not the model's tensors
  virtual at::Tensor loss(const batch& x) = 0;

  /// While the model is traced, computes the loss as often as measuring needs
  /// and leaves the step body; else does nothing.
  void rehearse(const batch& x);

  /// Tells whether this is a language model that can continue a text.
  virtual bool continues_text() const = 0;

  /// tokens: [B, T] int64 @returns logits [B, T, V]; only if `continues_text`
  virtual at::Tensor logits(const at::Tensor& tokens) = 0;

  /// Makes it the model of the current session, which this must outlive.
  virtual std::unique_ptr<distributed_model_base> distribute() = 0;
};

/// A `torch::nn` model as `trainable`.
class nn_trainable : public trainable {
public:
  using loss_function = std::function<at::Tensor(const batch&)>;
  using logits_function = std::function<at::Tensor(const at::Tensor&)>;
  using inputs_check = std::function<void(size_t)>;

  /// @param loss calls `root`, or modules below it
  /// @param check what `check_inputs` does; empty if any number will do
  /// @param logits as `loss`, empty unless the model continues text
  nn_trainable(std::shared_ptr<torch::nn::Module> root, loss_function loss,
               inputs_check check = {}, logits_function logits = {});

  torch::nn::Module& root() const noexcept {
    return *root_;
  }

  named_tensors named_parameters() const override;

  named_tensors named_buffers() const override;

  std::unordered_map<const void*, std::string> module_paths() const override;

  bool make_observable() override;

  void train(bool on) override;

  void check_inputs(size_t tensors) const override {
    if (check_)
      check_(tensors);
  }

  at::Tensor loss(const batch& x) override {
    check_inputs(x.size());
    return loss_(x);
  }

  bool continues_text() const override {
    return static_cast<bool>(logits_);
  }

  at::Tensor logits(const at::Tensor& tokens) override {
    return logits_(tokens);
  }

  std::unique_ptr<distributed_model_base> distribute() override;

private:
  std::shared_ptr<torch::nn::Module> root_;
  loss_function loss_;
  inputs_check check_;
  logits_function logits_;
};

/// @returns the type in which the loss of a run is computed, under autocast;
/// float32: there is no autocast
c10::ScalarType computed_in(const train_config& x);

/// @returns what errors of its code call the model: of a plug-in its name and
/// its library
std::string name_of_model(const train_config& x);

/// Makes the model of `x` with the first values that every rank, and a run
/// without ranks, gives it: seeds LibTorch's default generator with smp.seed.
/// (Ranks that are threads share that generator and must take turns.) With
/// train.dtype, or parameters in half precision, its loss and logits are
/// computed under autocast. (Who distributes it casts the parameters.)
/// @throws error (config) naming the key whose value makes no model
std::unique_ptr<trainable> make_trainable(const train_config& x);

/// Tells whether `rank` of several can do with parameters that get their values
/// when the partition is known, so that it never holds more than its part:
/// where nobody has to run the model alone (a trace), or the model is in a
/// file, of which only rank 0 ever needs all.
bool defers_parameters(const train_config& x, uint64_t rank);

/// Finds what can be wrong with the model of `x` without making it.
/// @throws error (config)
void check_model(const train_config& x);

/// @param replicas that share a batch: as many times data.batch_size samples
/// @throws error (config) naming what is wrong with the data
std::unique_ptr<data_source> make_data(const train_config& x,
                                       uint64_t replicas = 1);

} // namespace smp
