#include "runtime/trainable.hpp"

#include "runtime/autocast.hpp"
#include "runtime/distributed_model.hpp"
#include "runtime/models/builtin.hpp"
#include "runtime/trace_recorder.hpp"

#include <torch/nn/module.h>
#include <torch/utils.h>

#include <unordered_set>

namespace smp {

namespace {

template <class Items>
named_tensors each_once(const Items& items) {
  named_tensors result;
  std::unordered_set<const void*> seen;
  for (auto& item : items)
    if (item.value().defined()
        && seen.insert(item.value().unsafeGetTensorImpl()).second)
      result.emplace_back(item.key(), item.value());
  return result;
}

c10::ScalarType autocast_dtype(const std::string& x) {
  if (x == "bfloat16")
    return c10::ScalarType::BFloat16;
  return x == "float16" ? c10::ScalarType::Half : c10::ScalarType::Float;
}

/// Any model under autocast: parameters and gradients stay float32.
class cast_trainable : public trainable {
public:
  cast_trainable(std::unique_ptr<trainable> model, c10::ScalarType dtype)
    : model_(std::move(model)), dtype_(dtype) {
    // nop
  }

  named_tensors named_parameters() const override {
    return model_->named_parameters();
  }

  named_tensors named_buffers() const override {
    return model_->named_buffers();
  }

  void train(bool on) override {
    model_->train(on);
  }

  at::Tensor loss(const batch& x) override {
    autocast inside{dtype_};
    return model_->loss(x);
  }

  bool continues_text() const override {
    return model_->continues_text();
  }

  at::Tensor logits(const at::Tensor& tokens) override {
    autocast inside{dtype_};
    return model_->logits(tokens).to(c10::ScalarType::Float);
  }

  std::unique_ptr<distributed_model_base> distribute() override {
    return model_->distribute();
  }

private:
  std::unique_ptr<trainable> model_;
  c10::ScalarType dtype_;
};

} // namespace

trainable::~trainable() = default;

void trainable::rehearse(const batch& x) {
  auto* trace = trace_recorder::current();
  if (!trace)
    return;
  for (traced_model_call call; call.again();) {
    batch copy;
    for (auto& tensor : x)
      copy.push_back(tensor.clone()); // a model may change its input
    loss(copy);
  }
  trace->finish();
}

nn_trainable::nn_trainable(std::shared_ptr<torch::nn::Module> root,
                           loss_function loss, logits_function logits)
  : root_(std::move(root)), loss_(std::move(loss)), logits_(std::move(logits)) {
  // nop
}

named_tensors nn_trainable::named_parameters() const {
  return each_once(root_->named_parameters());
}

named_tensors nn_trainable::named_buffers() const {
  return each_once(root_->named_buffers());
}

void nn_trainable::train(bool on) {
  root_->train(on);
}

std::unique_ptr<distributed_model_base> nn_trainable::distribute() {
  return std::make_unique<distributed_model_base>(root_);
}

std::unique_ptr<trainable> make_trainable(const train_config& x) {
  torch::manual_seed(x.smp.seed);
  auto result = make_builtin(x);
  auto dtype = autocast_dtype(x.train.dtype);
  if (dtype != c10::ScalarType::Float)
    result = std::make_unique<cast_trainable>(std::move(result), dtype);
  return result;
}

std::unique_ptr<data_source> make_data(const train_config& x) {
  if (x.data.type == "text")
    return std::make_unique<text_sequences>(
      text::read(x.data.path, x.data.held_out),
      text_sequences::options{.sequence_length = x.data.sequence_length,
                              .batch_size = x.data.batch_size,
                              .seed = x.data.shuffle_seed});
  if (x.data.type == "synthetic")
    return std::make_unique<synthetic_tokens>(synthetic_tokens::options{
      .vocabulary = x.model.vocabulary.value_or(256),
      .sequence_length = x.data.sequence_length,
      .batch_size = x.data.batch_size,
      .seed = x.data.shuffle_seed});
  throw error{error_code::config, "data.type: unknown '" + x.data.type + "'"};
}

} // namespace smp
