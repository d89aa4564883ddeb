#include "tests/support/torch/verify_jobs.hpp"

#include "runtime/checkpoint/safetensors.hpp"
#include "runtime/replicas/gradient_buckets.hpp"
#include "runtime/session/rank_runtime.hpp"
#include "runtime/step/model_state.hpp"
#include "runtime/train/trainable.hpp"
#include "runtime/verify/verify.hpp"
#include "smp/smp.hpp"
#include "tests/support/runs/program.hpp"
#include "tests/support/scratch_dir.hpp"

#include <ATen/CPUGeneratorImpl.h>
#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <functional>
#include <mutex>

namespace smp::test {

namespace {

namespace nn = torch::nn;
using torch::Tensor;

constexpr int64_t width = 8, batch_size = 24;

// -- data ---------------------------------------------------------------------

/// x: [batch_size, width], y: [batch_size, width], other ones in each step.
class random_batches final : public data_source {
public:
  uint64_t batch_size() const noexcept override {
    return static_cast<uint64_t>(test::batch_size);
  }

  bool has_held_out() const noexcept override {
    return false;
  }

private:
  batch make_training(uint64_t step, batch_part part) const override {
    auto gen = at::make_generator<at::CPUGeneratorImpl>(step + 1);
    auto draw = [&] { return torch::randn({test::batch_size, width}, gen); };
    auto x = draw();
    return part_of({x, draw()}, part);
  }

  batch make_held_out(uint64_t, uint64_t, batch_part) const override {
    return {};
  }
};

// -- models -------------------------------------------------------------------

/// Linear, then tanh: its values stay small whatever is done with it.
struct layer_impl : nn::Module {
  explicit layer_impl(double dropout = 0)
    : fc(register_module("fc", nn::Linear(width, width))), p(dropout) {
    // nop
  }

  Tensor forward(Tensor x) {
    return torch::dropout(torch::tanh(fc(x)), p, is_training());
  }

  nn::Linear fc;
  double p;
};
TORCH_MODULE_IMPL(layer, layer_impl);

/// A Linear that uses another module's weight.
struct borrower_impl : nn::Module {
  borrower_impl() : bias(register_parameter("bias", torch::zeros({width}))) {
    // nop
  }

  Tensor forward(Tensor x, Tensor weight) {
    return torch::tanh(torch::matmul(x, weight)) + bias;
  }

  Tensor bias;
};
TORCH_MODULE_IMPL(borrower, borrower_impl);

/// Any code over some layers, which lie on the ranks in turn.
struct net_impl : nn::Module {
  using code = std::function<Tensor(net_impl&, Tensor)>;

  net_impl(uint64_t ranks, size_t n, double dropout, code f) : f(std::move(f)) {
    for (size_t i = 0; i < n; ++i) {
      partition_scope scope{static_cast<uint32_t>(i % ranks)};
      layers.emplace_back(dropout);
    }
    for (size_t i = 0; i < n; ++i)
      register_module("layer" + std::to_string(i), layers[i]);
    partition_scope scope{static_cast<uint32_t>(ranks - 1)};
    lent = submodule<borrower>();
    norm = submodule<nn::BatchNorm1d>(width);
  }

  Tensor forward(Tensor x) {
    return f(*this, x);
  }

  std::vector<submodule<layer>> layers;
  // Registered by the models that use them.
  submodule<borrower> lent = nullptr;
  submodule<nn::BatchNorm1d> norm = nullptr;
  Tensor weight;
  nn::Sequential tail;
  code f;
};
TORCH_MODULE_IMPL(net, net_impl);

Tensor chain(net_impl& x, Tensor y) {
  for (auto& l : x.layers)
    y = l(y);
  return y;
}

net make_norm(uint64_t ranks) {
  net result{ranks, 3, 0.0, [](net_impl& x, Tensor y) {
               y = x.norm(x.layers[0](y));
               return x.layers[1](x.tail->forward(x.layers[2](y)));
             }};
  result->register_module("norm", result->norm);
  result->tail = nn::Sequential(nn::Linear(width, width),
                                nn::BatchNorm1d(width), nn::ReLU());
  result->register_module("tail", result->tail);
  return result;
}

net make_remote(uint64_t ranks) {
  net result{ranks, 2, 0.0, [](net_impl& x, Tensor y) {
               y = torch::matmul(x.layers[0](y), x.weight);
               return x.lent(x.layers[1](y), x.weight);
             }};
  result->register_module("lent", result->lent);
  result->weight = result->register_parameter("weight",
                                              torch::randn({width, width}) / 3);
  return result;
}

net make_long(uint64_t ranks) {
  net result{ranks, 2, 0.0, [](net_impl& x, Tensor y) {
               return chain(x, y) + x.weight.sum() / 512;
             }};
  result->weight = result->register_parameter("weight",
                                              torch::zeros({1 << 22}));
  return result;
}

net make_net(const std::string& model, uint64_t ranks) {
  if (model == "norm")
    return make_norm(ranks);
  if (model == "remote")
    return make_remote(ranks);
  if (model == "long")
    return make_long(ranks);
  if (model == "dropout")
    return net{ranks, 4, 0.3, chain};
  if (model == "reuse")
    return net{ranks, 2, 0.0, [](net_impl& x, Tensor y) {
                 for (int i = 0; i < 3; ++i)
                   y = x.layers[1](y) + y;
                 return x.layers[0](y);
               }};
  if (model == "branch")
    return net{ranks, 4, 0.0, [](net_impl& x, Tensor y) {
                 size_t i = 0;
                 do
                   y = x.layers[i](y);
                 while (++i < x.layers.size() && y.sum().item<double>() > 0);
                 return x.layers.back()(y);
               }};
  if (model == "frozen") {
    net result{ranks, 4, 0.0, chain};
    for (size_t i = 0; i < 2; ++i)
      for (auto& p : result->layers[i]->parameters())
        p.set_requires_grad(false);
    return result;
  }
  if (model == "unused")
    return net{ranks, 4, 0.0, [](net_impl& x, Tensor y) {
                 x.layers[1](y);
                 return x.layers[3](x.layers[0](y));
               }};
  if (model == "towers")
    return net{ranks, 4, 0.0, [](net_impl& x, Tensor y) {
                 auto a = x.layers[0](x.layers[1](y));
                 auto b = x.layers[2](x.layers[3](y));
                 return x.layers[1](a + b) + y;
               }};
  throw std::invalid_argument{"no model " + model};
}

train_config loopback_config(uint64_t ranks, const std::string& pipeline,
                             uint64_t microbatches) {
  train_config result;
  result.smp.pipeline_parallel_degree = ranks;
  result.smp.pipeline = pipeline;
  result.smp.microbatches = microbatches;
  result.smp.threads = 1;
  result.threads_as_ranks = true;
  result.optimizer.lr = 1e-2;
  result.train.steps = 10;
  return result;
}

std::string name_of(const std::string& model, const train_config& x) {
  return model + ", " + std::to_string(x.smp.pipeline_parallel_degree)
         + " ranks, " + x.smp.pipeline + ", "
         + std::to_string(x.smp.microbatches) + " microbatches";
}

/// Prints nothing, and counts.
class silent_listener final : public train_listener {
public:
  explicit silent_listener(session& s) : session_(s) {
    // nop
  }

  const rank_counts& counts() const noexcept {
    return counts_;
  }

  void on_start(const train_start&) override {
    // nop
  }

  void on_step(const step_metrics&) override {
    counts_.offloaded_bytes += session_.last_step().offloaded_bytes;
    if (auto* buckets = session_.internals().state()->buckets())
      counts_.buckets = buckets->take_counts().buckets;
  }

  void on_evaluation(uint64_t, double) override {
    // nop
  }

private:
  session& session_;
  rank_counts counts_;
};

} // namespace

verify_case gpt_case(uint64_t ranks, const std::string& pipeline,
                     uint64_t microbatches) {
  verify_case result;
  auto& x = result.config;
  x = loopback_config(ranks, pipeline, microbatches);
  // Measured, so small a model may stay on one rank.
  x.smp.trace_device = "none";
  x.model.type = "gpt";
  x.model.layers = 4;
  x.model.heads = 2;
  x.model.width = 16;
  x.model.vocabulary = 32;
  x.data.type = "synthetic";
  x.data.sequence_length = 8;
  x.data.batch_size = 8;
  result.name = name_of("gpt", x);
  return result;
}

verify_case model_case(const std::string& model, uint64_t ranks,
                       const std::string& pipeline, uint64_t microbatches) {
  verify_case result;
  result.config = loopback_config(ranks, pipeline, microbatches);
  result.config.smp.auto_partition = false;
  result.name = name_of(model, result.config);
  result.job.make_model = [model, ranks]() -> std::unique_ptr<trainable> {
    torch::manual_seed(5);
    auto x = make_net(model, ranks);
    auto loss = [x](const batch& inputs) mutable {
      return nn::functional::mse_loss(x(inputs.at(0)), inputs.at(1));
    };
    return std::make_unique<nn_trainable>(x.ptr(), loss);
  };
  result.job.make_data = [] { return std::make_unique<random_batches>(); };
  return result;
}

verify_case script_case(const std::string& model, uint64_t ranks,
                        uint64_t microbatches) {
  verify_case result;
  auto& x = result.config;
  x = loopback_config(ranks, "interleaved", microbatches);
  x.smp.auto_partition = false;
  x.model.type = "torchscript";
  x.model.path = source_file("tests/data/zoo/" + model + ".pt");
  x.data.type = "safetensors";
  x.data.path = source_file("tests/data/zoo/" + model + ".batch.safetensors");
  result.name = name_of(model, x);
  return result;
}

std::string longer_batch(const std::string& path, const scratch_dir& dir) {
  named_tensors result;
  for (auto& [name, x] : read_safetensors(path).tensors) {
    std::vector<Tensor> parts;
    for (int64_t i = 0; i < 16; ++i)
      parts.push_back(x.roll({i}, {1}));
    result.emplace_back(name, torch::cat(parts));
  }
  std::string file = dir.path / "batch.safetensors";
  write_safetensors(file, result);
  return file;
}

verify_summary run_case(const verify_case& x, uint64_t steps, bool split,
                        std::vector<rank_counts>* ranks) {
  scratch_dir dir;
  if (ranks != nullptr)
    ranks->assign(ranks_of(x.config), {});
  verify_summary result;
  virtual_world_options world;
  world.config = x.config.smp;
  world.reorder = true;
  run_virtual_world(ranks_of(x.config), world, [&](session& s) {
    silent_listener silent{s};
    static const std::atomic<bool> no = false;
    verify_options options;
    options.steps = steps;
    options.split = split;
    auto mine = verify(s, x.config, dir.path, silent, no, options, x.job);
    if (ranks != nullptr)
      ranks->at(s.rank()) = silent.counts();
    if (s.rank() == 0)
      result = std::move(mine);
  });
  return result;
}

} // namespace smp::test
