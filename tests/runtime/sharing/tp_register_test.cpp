#include "tests/support/catch.hpp"

#include "runtime/model/module_walk.hpp"
#include "runtime/sharing/native_modules.hpp"
#include "smp/nn.hpp"
#include "tests/support/error_of.hpp"
#include "tests/support/torch/near.hpp"
#include "tests/support/torch/training_step.hpp"
#include "tests/support/torch/two_ranks.hpp"

#include <torch/nn/functional/embedding.h>
#include <torch/nn/functional/normalization.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/utils.h>

#include <cmath>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

// Classes of a user's that are shared by hooks (`smp::tp_register`).

using namespace smp;
using namespace smp::test;
using Catch::Matchers::ContainsSubstring;

namespace {

namespace F = torch::nn::functional;

/// A Linear with other options, names, arguments and results.
struct kernel_options {
  int64_t in = 0;
  int64_t out = 0;
  bool offset = true;
};

struct kernel_impl : torch::nn::Module {
  explicit kernel_impl(kernel_options x)
    : kernel(register_parameter("kernel", torch::randn({x.in, x.out})
                                            / std::sqrt(x.in))) {
    if (x.offset)
      offset = register_parameter("offset", torch::randn({x.out}));
  }

  /// @returns what comes out, and the mean over its channels
  std::tuple<Tensor, Tensor> forward(const Tensor& x, double scale) {
    auto y = (x * scale).matmul(kernel);
    if (offset.defined())
      y = y + offset;
    return {y, y.mean(-1)};
  }

  Tensor kernel, offset;
};
TORCH_MODULE_IMPL(kernel, kernel_impl);

[[maybe_unused]] const bool kernel_is_registered = tp_register<
  kernel_impl, smp::nn::distributed_linear>(
  [](const kernel_impl&) {
    return linear_options{
      .weight = "kernel", .bias = "offset", .inputs_first = true};
  },
  [](const Tensor& x, double scale) { return x * scale; },
  [](const Tensor& y) {
    return std::tuple{y, y.mean(-1)};
  });

/// A norm and a table whose parameters stand below them.
struct outer_norm_impl : torch::nn::Module {
  explicit outer_norm_impl(int64_t width) {
    inner->register_parameter("gain", torch::rand({width}));
    register_module("inner", inner);
  }

  Tensor forward(Tensor x) {
    return F::detail::layer_norm(x, {x.size(-1)},
                                 inner->named_parameters()["gain"], {}, 1e-3);
  }

  std::shared_ptr<torch::nn::Module>
    inner = std::make_shared<torch::nn::Module>();
};
TORCH_MODULE_IMPL(outer_norm, outer_norm_impl);

[[maybe_unused]] const bool norm_is_registered = tp_register<
  outer_norm_impl, smp::nn::distributed_layer_norm>(
  [](const outer_norm_impl& x) {
    return layer_norm_options{
      .weight = "inner.gain",
      .normalized_shape = x.inner->named_parameters()["gain"].sizes().vec(),
      .eps = 1e-3};
  });

struct words_impl : torch::nn::Module {
  words_impl(int64_t rows, int64_t width)
    : table(register_parameter("table", torch::randn({rows, width}))) {
    // nop
  }

  Tensor forward(Tensor x, Tensor shift) {
    return F::detail::embedding(x + shift, table, {}, {}, 2, false, false);
  }

  Tensor table;
};
TORCH_MODULE_IMPL(words, words_impl);

[[maybe_unused]] const bool words_are_registered = tp_register<
  words_impl, smp::nn::distributed_embedding>(
  [](const words_impl&) { return embedding_options{.weight = "table"}; },
  [](const Tensor& x, const Tensor& shift) { return x + shift; });

/// Two linears that are shared by a class of one's own: the first cut along its
/// outputs, the second along its inputs.
struct pair_impl : torch::nn::Module {
  pair_impl(int64_t width, double slope)
    : slope(slope),
      up(register_parameter("up", torch::randn({width, 4 * width})
                                    / std::sqrt(width))),
      down(register_parameter("down", torch::randn({4 * width, width})
                                        / std::sqrt(4 * width))) {
    // nop
  }

  Tensor forward(Tensor x) {
    return torch::leaky_relu(x.matmul(up), slope).matmul(down);
  }

  double slope;
  Tensor up, down;
};
TORCH_MODULE_IMPL(pair, pair_impl);

class distributed_pair {
public:
  static parameter_axes axes(const double&) {
    return {{"up", 1}, {"down", 0}};
  }

  static std::string refusal(const double& slope, int64_t) {
    return slope < 0 ? "its slope is negative" : "";
  }

  distributed_pair(const double& slope, const smp::nn::parameter_parts& parts)
    : slope_(slope), up_(parts.at("up")), down_(parts.at("down")) {
    // nop
  }

  Tensor forward(const Tensor& x) const {
    auto all = smp::nn::fused_allgather_for_tp(x, 0);
    auto inner = torch::leaky_relu(all.matmul(up_), slope_);
    return smp::nn::reduce_scatter_for_tp(inner.matmul(down_), 0);
  }

private:
  double slope_;
  Tensor up_, down_;
};

[[maybe_unused]] const bool pair_is_registered = tp_register<pair_impl,
                                                             distributed_pair>(
  [](const pair_impl& x) { return x.slope; });

constexpr int64_t rows = 40;

template <template <class> class P>
struct mixed_impl : torch::nn::Module {
  explicit mixed_impl(int64_t width)
    : table(rows, width),
      first(kernel_options{width, width}),
      norm(width),
      second(width, 0.1),
      third(kernel_options{width, width, false}),
      tail(pair(width, 0.2), torch::nn::Linear(width, 1)) {
    register_module("table", table);
    register_module("first", first);
    register_module("norm", norm);
    register_module("second", second);
    register_module("third", third);
    register_module("tail", tail);
  }

  Tensor forward(Tensor x) {
    auto h = table(x, torch::ones({1}, torch::kLong));
    auto [y, means] = first(h, 0.5);
    h = norm(h + y + means.unsqueeze(-1));
    h = h + second(h);
    auto [z, again] = third(h, 2.0);
    return (tail->forward(z).squeeze(-1) + again).square().mean();
  }

  P<words> table;
  P<kernel> first;
  P<outer_norm> norm;
  P<pair> second;
  P<kernel> third;
  torch::nn::Sequential tail;
};

struct shared_model_impl : mixed_impl<submodule> {
  using mixed_impl<submodule>::mixed_impl;
};
TORCH_MODULE_IMPL(shared_model, shared_model_impl);

session_config sharing(uint64_t peers, uint64_t pipeline = 1,
                       bool same_samples = false) {
  session_config x;
  x.prescaled_batch = same_samples;
  x.tensor_parallel_degree = peers;
  x.pipeline_parallel_degree = pipeline;
  x.tensor_parallel_modules = {"*", "norm"};
  x.ddp = true;
  x.microbatches = 2;
  x.threads = 1;
  return x;
}

/// [samples, tokens]
Tensor data(int64_t samples, int64_t tokens) {
  return torch::arange(samples * tokens).view({samples, tokens}) * 7
         % (rows - 1);
}

using numbers = std::map<std::string, Tensor>;

struct outcome {
  numbers gradients;
  double loss = 0;
  std::string text;
};

outcome train_shared(const session_config& config, int64_t width,
                     int64_t tokens) {
  outcome result;
  std::mutex mutex;
  virtual_world_options world;
  world.config = config;
  world.reorder = true;
  auto peers = config.tensor_parallel_degree;
  run_virtual_world(
    peers * config.pipeline_parallel_degree, world, [&](session& s) {
      distributed_model model{seeded([&] { return shared_model{width}; })};
      auto train_step = training_step(model);
      auto n = static_cast<int64_t>(data_size());
      auto loss = train_step(data(4 * n, tokens).chunk(n).at(data_rank()))
                    .reduce_mean();
      loss = allreduce(loss, comm_group::dp, reduce_op::mean);
      auto gradients = model.gradients();
      std::unique_lock guard{mutex};
      if (s.rank() != 0)
        return;
      result.gradients = {gradients.begin(), gradients.end()};
      result.loss = loss.item<double>();
      result.text = model.partition_text();
    });
  return result;
}

/// @returns the partition print, or what the step fails with
template <class M>
std::string text_of(M make, bool calls = false) {
  std::string result;
  std::mutex mutex;
  virtual_world_options world;
  world.config = sharing(2);
  world.config.tensor_parallel_modules = {"*"};
  run_virtual_world(2, world, [&](session& s) {
    std::string mine;
    try {
      distributed_model model{seeded(make)};
      model.partition();
      mine = model.partition_text();
      auto body = step([&](Tensor x) { return model(x).detach(); });
      if (calls)
        body(torch::ones({4, 8}));
    } catch (const error& e) {
      mine = e.what();
    }
    std::unique_lock guard{mutex};
    if (s.rank() == 0)
      result = mine;
  });
  return result;
}

// -- hooks that give the wrong thing ------------------------------------------

enum class mistake { tensors, undefined, name, missing, throws, no_axis, odd };

template <mistake What>
struct wrong_impl : torch::nn::Module {
  wrong_impl()
    : weight(register_parameter("weight", torch::ones({8, 8}))),
      scale(register_parameter("scale", torch::ones({3}))) {
    // nop
  }

  Tensor forward(Tensor x) {
    return F::linear(x, weight);
  }

  Tensor weight, scale;
};

struct cut_anywhere {
  static parameter_axes axes(const parameter_axes& x) {
    return x;
  }

  cut_anywhere(const parameter_axes&, const smp::nn::parameter_parts&) {
    // nop
  }

  Tensor forward(const Tensor& x) const {
    return x;
  }
};

template <mistake What>
linear_options told(const wrong_impl<What>&) {
  if (What == mistake::throws)
    throw std::runtime_error{"no idea"};
  return {.weight = What == mistake::missing ? "wieght" : "weight",
          .bias = What == mistake::name ? "bias" : "scale"};
}

[[maybe_unused]] const bool wrong_are_registered
  = tp_register<wrong_impl<mistake::name>, smp::nn::distributed_linear>(
      told<mistake::name>)
    && tp_register<wrong_impl<mistake::missing>, smp::nn::distributed_linear>(
      told<mistake::missing>)
    && tp_register<wrong_impl<mistake::throws>, smp::nn::distributed_linear>(
      told<mistake::throws>)
    && tp_register<wrong_impl<mistake::no_axis>, cut_anywhere>([](auto&) {
         return parameter_axes{{"weight", 2}};
       })
    && tp_register<wrong_impl<mistake::odd>, cut_anywhere>([](auto&) {
         return parameter_axes{{"scale", 0}};
       });

struct many_impl : torch::nn::Module {
  explicit many_impl(bool defined) : defined(defined) {
    register_parameter("weight", torch::ones({8, 8}));
  }

  Tensor forward(Tensor x) {
    return x;
  }

  bool defined;
};
TORCH_MODULE_IMPL(many, many_impl);

bool gives_undefined = false;

[[maybe_unused]] const bool many_is_registered = tp_register<
  many_impl, smp::nn::distributed_linear>(
  [](const many_impl&) { return linear_options{}; },
  [](const Tensor& x) {
    return gives_undefined ? std::vector{Tensor{}} : std::vector{x, x};
  });

struct twice_impl : torch::nn::Module {
  Tensor forward(Tensor x) {
    return x;
  }
};

/// The feed-forward half of a layer, whose linears are in a Sequential.
struct half_impl : torch::nn::Module {
  explicit half_impl(const torch::nn::Sequential& x) {
    register_module("mlp", x);
  }

  Tensor forward(Tensor x) {
    return x;
  }
};

[[maybe_unused]] const bool half_is_registered = tp_register<
  half_impl, smp::nn::distributed_transformer_output_layer>(
  [](const half_impl&) {
    transformer_output_layer_options result;
    result.intermediate.name = "mlp.0";
    result.output.name = "mlp.1";
    return result;
  });

template <mistake What>
std::string text_of_wrong() {
  return text_of([] {
    auto module = std::make_shared<wrong_impl<What>>();
    torch::nn::Sequential result;
    result->push_back("wrong",
                      torch::nn::ModuleHolder<wrong_impl<What>>{module});
    return result;
  });
}

} // namespace

TEST_CASE("classes that are shared by hooks compute what one process does",
          "[runtime][tensor_parallel][tp_register]") {
  auto peers = GENERATE(uint64_t{2}, uint64_t{4});
  auto pipeline = GENERATE(uint64_t{1}, uint64_t{2});
  auto width = GENERATE(int64_t{8}, int64_t{256});
  auto same = GENERATE(false, true);
  if (width > 8 && peers + pipeline != 4)
    return;
  const int64_t tokens = width > 8 ? 80 : 3;
  CAPTURE(peers, pipeline, width, same);
  auto x = train_shared(sharing(peers, pipeline, same), width, tokens);
  for (auto* line : {"Embedding shared by", "Conv1D shared by",
                     "LayerNorm shared by", "distributed_pair shared by"})
    CHECK_THAT(x.text, ContainsSubstring(line));
  auto model = seeded([&] { return mixed_impl<as_is>{width}; });
  auto n = static_cast<int64_t>(same ? 1 : peers);
  auto parts = data(4 * n, tokens).chunk(2 * n);
  double loss = 0;
  for (auto& part : parts) {
    auto y = model.forward(part) / static_cast<double>(parts.size());
    y.backward();
    loss += y.item<double>();
  }
  CHECK(std::abs(loss - x.loss) <= 1e-5 * loss);
  for (auto& p : model.named_parameters()) {
    INFO(p.key());
    REQUIRE(x.gradients.contains(p.key()));
    check_near(x.gradients.at(p.key()), p.value().grad());
  }
}

TEST_CASE("an init hook that tells of other parameters is named in the print",
          "[runtime][tensor_parallel][tp_register]") {
  CHECK_THAT(text_of_wrong<mistake::name>(),
             ContainsSubstring("not shared, as its init hook does not tell of "
                               "its parameter 'scale'; a distributed module "
                               "of its own could: wrong"));
  CHECK_THAT(text_of_wrong<mistake::missing>(),
             ContainsSubstring("its init hook tells of a parameter 'wieght', "
                               "which it does not have; the hook has to name "
                               "one of its own: wrong"));
  CHECK_THAT(text_of_wrong<mistake::throws>(),
             ContainsSubstring("tp_register: the init hook of ")
               && ContainsSubstring("failed for 'wrong': no idea"));
}

TEST_CASE("a distributed module that cuts what cannot be cut is not used",
          "[runtime][tensor_parallel][tp_register]") {
  CHECK_THAT(text_of_wrong<mistake::no_axis>(),
             ContainsSubstring("cut_anywhere not shared, as its 'weight' has 2 "
                               "axes, and is to be cut along 2; axes() count "
                               "from 0: wrong"));
  CHECK_THAT(text_of_wrong<mistake::odd>(),
             ContainsSubstring("its 3 numbers along axis 0 of 'scale' cannot "
                               "be divided among 2 ranks; 2 or 4 could: "
                               "wrong"));
  auto negative = [] {
    torch::nn::Sequential result;
    result->push_back("pair", pair(8, -1.0));
    return result;
  };
  CHECK_THAT(text_of(negative),
             ContainsSubstring("distributed_pair not shared, as its slope is "
                               "negative: pair"));
}

TEST_CASE("a forward hook that gives other tensors than are taken is an error",
          "[runtime][tensor_parallel][tp_register]") {
  auto make = [] {
    torch::nn::Sequential result;
    result->push_back("many", many(true));
    return result;
  };
  gives_undefined = false;
  CHECK_THAT(text_of(make, true),
             ContainsSubstring("many")
               && ContainsSubstring("the forward hook of many_impl gave 2 "
                                    "tensors, but distributed_linear takes 1"));
  gives_undefined = true;
  CHECK_THAT(text_of(make, true),
             ContainsSubstring("gave an undefined tensor"));
}

TEST_CASE(
  "a class that is registered again leaves the first hooks to those "
  "who use them",
  "[runtime][model][tp_register]") {
  auto used = std::make_shared<int>();
  std::weak_ptr<int> first = used;
  auto told = [](const twice_impl&) { return linear_options{}; };
  tp_register<twice_impl, smp::nn::distributed_linear>(
    told, [used](const Tensor& x) { return x; });
  used.reset();
  REQUIRE_FALSE(first.expired());
  tp_register<twice_impl, smp::nn::distributed_linear>(
    told, [](const Tensor& x) { return x + 1; });
  CHECK_FALSE(first.expired());
}

TEST_CASE("containers below a layer are known by their places in it",
          "[runtime][model][tp_register]") {
  torch::nn::Sequential mlp{torch::nn::Linear(2, 4), torch::nn::Linear(4, 2)};
  torch::nn::Module root;
  root.register_module("ff", mlp); // its first name
  root.register_module("layer", std::make_shared<half_impl>(mlp));
  auto model = walk(root);
  auto native = native_of(model, model.find_module("layer").value());
  REQUIRE(native);
  REQUIRE(native->layer);
  CHECK(native->layer->containers == std::set<std::string>{"mlp"});
}
