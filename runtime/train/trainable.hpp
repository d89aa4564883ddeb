#pragma once

// The model and the data of a configuration. A training loop, a check and a
// comparison with one process need the same model with the same initial values
// and the same batches, but must not know its kind; nor may the comparison see
// anything of the pipeline (R36).

#include "runtime/base/named_tensors.hpp"
#include "runtime/data/data.hpp"

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

  /// The first path of each module, by the identity that a `call_observer`
  /// receives; nothing if calls cannot be observed.
  virtual std::unordered_map<const void*, std::string> module_paths() const;

  /// Without a session, makes a `call_observer` see the calls that smp would
  /// intercept after a partition.
  /// @returns false if the model runs other code from now on, so that it no
  ///          longer proves anything about the original one
  virtual bool make_observable();

  /// Without a session, makes a `call_observer` see the begin and end of these
  /// calls where `make_observable` would run other code; the original code
  /// continues to run.
  virtual void mark_calls();

  /// Training or evaluation mode of all modules.
  virtual void train(bool on) = 0;

  /// @param tensors how many a batch has
  /// @throws error (config) if the model does not take that many
  virtual void check_inputs(size_t tensors) const;

  /// x: the tensors of a batch, or of a microbatch, in the order of the data
  /// source @returns a scalar: the mean over the (micro)batch
  /// @throws error (config) if these are not the model's tensors
  virtual at::Tensor loss(const batch& x) = 0;

  /// While the model is traced, computes the loss as often as measuring needs
  /// and then leaves the step body; otherwise does nothing.
  void rehearse(const batch& x);

  /// Tells whether this is a language model that can continue a text.
  virtual bool continues_text() const = 0;

  /// tokens: [B, T] int64 @returns logits [B, T, V]; only if `continues_text`
  virtual at::Tensor logits(const at::Tensor& tokens) = 0;

  /// Makes it the model of the current session. This must outlive the result.
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

/// @returns the type in which a run computes its loss, under autocast; with
/// float32 there is no autocast
c10::ScalarType computed_in(const train_config& x);

/// @returns what errors in the model's code call the model: for a plug-in its
/// name and its library
std::string name_of_model(const train_config& x);

/// Makes the model of `x` with the initial values that every rank, and a run
/// without ranks, gives it: seeds LibTorch's default generator with smp.seed.
/// (Ranks that are threads share that generator and must take turns.) With
/// train.dtype, or parameters in half precision, its loss and logits are
/// computed under autocast. (The parameters are cast when it is distributed.)
/// @throws error (config) naming the key whose value makes no model
std::unique_ptr<trainable> make_trainable(const train_config& x);

/// Tells whether `rank` of several can leave parameters without values until
/// the partition is known, so that it never holds more than its part: if no
/// rank has to run the whole model (no trace), or if the model is in a file,
/// which only rank 0 ever needs in full.
bool defers_parameters(const train_config& x, uint64_t rank);

/// Checks the model of `x` as far as possible without making it.
/// @throws error (config)
void check_model(const train_config& x);

/// @param replicas that share a batch of data.batch_size samples for each
/// @throws error (config) naming what is wrong with the data
std::unique_ptr<data_source> make_data(const train_config& x,
                                       uint64_t replicas = 1);

} // namespace smp
