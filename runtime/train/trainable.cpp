#include "runtime/train/trainable.hpp"

#include "runtime/base/autocast.hpp"
#include "runtime/base/out_of_memory.hpp"
#include "runtime/deferred/delay_param_initialization.hpp"
#include "runtime/intercept/sequential.hpp"
#include "runtime/intercept/trace/tracer.hpp"
#include "runtime/session/distributed_model.hpp"
#include "runtime/train/models/builtin.hpp"
#include "runtime/train/models/synthetic.hpp"
#include "runtime/train/plugin.hpp"
#include "runtime/train/script_trainable.hpp"

#include <torch/nn/module.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/utils.h>

#include <fmt/format.h>

#include <algorithm>
#include <limits>
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

/// Any model under autocast.
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

  std::unordered_map<const void*, std::string> module_paths() const override {
    return model_->module_paths();
  }

  bool make_observable() override {
    return model_->make_observable();
  }

  void mark_calls() override {
    model_->mark_calls();
  }

  void train(bool on) override {
    model_->train(on);
  }

  void check_inputs(size_t tensors) const override {
    model_->check_inputs(tensors);
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

c10::ScalarType computed_in(const train_config& x) {
  if (x.smp.bf16_params || x.train.dtype == "bfloat16")
    return c10::ScalarType::BFloat16;
  return x.smp.fp16_params || x.train.dtype == "float16"
           ? c10::ScalarType::Half
           : c10::ScalarType::Float;
}

void trainable::rehearse(const batch& x) {
  auto* trace = tracer::current();
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

std::unordered_map<const void*, std::string> trainable::module_paths() const {
  return {};
}

bool trainable::make_observable() {
  return true;
}

void trainable::mark_calls() {
  // nop
}

void trainable::check_inputs(size_t) const {
  // nop
}

nn_trainable::nn_trainable(std::shared_ptr<torch::nn::Module> root,
                           loss_function loss, inputs_check check,
                           logits_function logits)
  : root_(std::move(root)),
    loss_(std::move(loss)),
    check_(std::move(check)),
    logits_(std::move(logits)) {
  // nop
}

named_tensors nn_trainable::named_parameters() const {
  return each_once(root_->named_parameters());
}

named_tensors nn_trainable::named_buffers() const {
  return each_once(root_->named_buffers());
}

std::unordered_map<const void*, std::string>
nn_trainable::module_paths() const {
  std::unordered_map<const void*, std::string> result;
  auto visit = [&result](auto& self, const torch::nn::Module& x,
                         const std::string& path) -> void {
    if (!result.emplace(dynamic_cast<const void*>(&x), path).second)
      return;
    for (auto& child : x.named_children())
      self(self, *child.value(),
           path.empty() ? child.key() : path + "." + child.key());
  };
  visit(visit, *root_, "");
  return result;
}

bool nn_trainable::make_observable() {
  for (auto& x : root_->modules())
    if (auto* sequential = dynamic_cast<torch::nn::SequentialImpl*>(x.get()))
      observe_children(*sequential);
  return true;
}

void nn_trainable::train(bool on) {
  root_->train(on);
}

std::unique_ptr<distributed_model_base> nn_trainable::distribute() {
  return std::make_unique<distributed_model_base>(root_);
}

namespace {

std::unique_ptr<trainable> make_model(const train_config& x) {
  if (x.model.type == "plugin")
    return make_plugin_model(x.model.library, x.model.name,
                             model_options{x.model.options});
  if (x.model.type == "torchscript")
    return make_script_trainable(x.model.path, x.model.operator_libraries);
  return make_builtin(x);
}

} // namespace

std::string name_of_model(const train_config& x) {
  return x.model.type == "plugin" ? fmt::format("model.name = \"{}\" of {}",
                                                x.model.name, x.model.library)
                                  : "the model";
}

namespace {

/// @param text what was thrown, of which the first line is used
/// @throws error that names the model
[[noreturn]] void refuse_model(const train_config& x, std::string text) {
  text.resize(std::min(text.size(), text.find('\n')));
  if (!is_out_of_memory(text))
    throw error{error_code::user_code, fmt::format("{} cannot be created: {}",
                                                   name_of_model(x), text)};
  throw error{
    error_code::config,
    fmt::format("no memory for the whole model: {}{}", text,
                x.smp.trace_device == "none"
                  ? ""
                  : "; with smp.trace_device = \"none\" a rank of a pipeline "
                    "makes only what it owns (docs/large_models.md)")};
}

} // namespace

std::unique_ptr<trainable> make_trainable(const train_config& x) {
  torch::manual_seed(x.smp.seed);
  std::unique_ptr<trainable> result;
  try {
    result = make_model(x);
  } catch (const error&) {
    throw;
  } catch (const c10::Error& err) {
    refuse_model(x, err.what_without_backtrace());
  } catch (const std::exception& err) {
    refuse_model(x, err.what());
  } catch (...) {
    refuse_model(x, "an exception that does not derive from std::exception");
  }
  auto dtype = computed_in(x);
  if (dtype != c10::ScalarType::Float)
    result = std::make_unique<cast_trainable>(std::move(result), dtype);
  return result;
}

bool defers_parameters(const train_config& x, uint64_t rank) {
  return x.smp.trace_device == "none"
         || (x.model.type == "torchscript" && rank > 0);
}

void check_model(const train_config& x) {
  if (x.model.type == "plugin")
    check_plugin_model(x.model.library, x.model.name);
  if (x.model.type == "torchscript") {
    delay_param_initialization without_bytes;
    make_script_trainable(x.model.path, x.model.operator_libraries);
  }
}

std::unique_ptr<data_source> make_data(const train_config& x,
                                       uint64_t replicas) {
  const auto& type = x.data.type;
  const auto batch_size = x.data.batch_size.value_or(0) * replicas;
  // A configuration does not say which tokens a user's model takes.
  const bool is_own = x.model.type == "torchscript" || x.model.type == "plugin";
  const auto vocabulary = is_own ? std::numeric_limits<uint64_t>::max()
                                 : x.model.vocabulary.value_or(256);
  if (type == "text" || type == "tokens")
    return std::make_unique<token_sequences>(
      x.data.path,
      token_sequences::options{.token_size = type == "text"             ? 1u
                                             : x.data.dtype == "uint16" ? 2u
                                                                        : 4u,
                               .vocabulary = vocabulary,
                               .held_out = x.data.held_out,
                               .sequence_length = x.data.sequence_length,
                               .batch_size = batch_size,
                               .seed = x.data.shuffle_seed});
  if (type == "safetensors" && x.data.batch_size)
    return make_row_samples(x.data.path, {.held_out = x.data.held_out,
                                          .batch_size = batch_size,
                                          .seed = x.data.shuffle_seed});
  if (type == "safetensors")
    return make_fixed_batch(x.data.path, x.smp.microbatches, replicas);
  if (type == "synthetic") {
    auto all = x;
    all.data.batch_size = batch_size;
    return make_synthetic(all);
  }
  throw error{error_code::config, "data.type: unknown '" + type + "'"};
}

} // namespace smp
