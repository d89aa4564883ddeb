#include "tests/support/catch.hpp"

#include "tests/support/torch/deferred.hpp"

#include <ATen/CPUGeneratorImpl.h>
#include <torch/torch.h>

#include <string>
#include <vector>

// What every first value must be: the bits that it would have without the
// scope.

using namespace smp;
using namespace smp::test;

using torch::Tensor;

namespace nn = torch::nn;
namespace init = torch::nn::init;

// -- the layers of LibTorch ---------------------------------------------------

TEST_CASE("layers of LibTorch come out bit-equal", "[runtime][delay]") {
  check_same("Linear", [] { return made<nn::Linear>(64, 96); });
  check_same(
    "Linear with a large bias", [] { return made<nn::Linear>(3, 2000); }, 2);
  check_same("Bilinear", [] { return made<nn::Bilinear>(16, 17, 18); });
  check_same("Conv1d",
             [] { return made<nn::Conv1d>(nn::Conv1dOptions(32, 48, 3)); });
  check_same("Conv2d", [] {
    return made<nn::Conv2d>(nn::Conv2dOptions(16, 32, 3).groups(2));
  });
  check_same("Conv3d",
             [] { return made<nn::Conv3d>(nn::Conv3dOptions(8, 16, 3)); });
  check_same("ConvTranspose2d", [] {
    return made<nn::ConvTranspose2d>(nn::ConvTranspose2dOptions(16, 32, 3));
  });
  check_same("Embedding", [] { return made<nn::Embedding>(100, 64); });
  check_same("Embedding with padding", [] {
    return made<nn::Embedding>(nn::EmbeddingOptions(100, 64).padding_idx(7));
  });
  check_same("EmbeddingBag", [] { return made<nn::EmbeddingBag>(100, 64); });
  check_same(
    "LayerNorm",
    [] { return made<nn::LayerNorm>(nn::LayerNormOptions({2048})); }, 2);
  check_same(
    "GroupNorm",
    [] { return made<nn::GroupNorm>(nn::GroupNormOptions(4, 2048)); }, 2);
  check_same(
    "BatchNorm1d", [] { return made<nn::BatchNorm1d>(2048); }, 4);
  check_same(
    "BatchNorm2d", [] { return made<nn::BatchNorm2d>(2048); }, 4);
  check_same("PReLU", [] {
    return made<nn::PReLU>(nn::PReLUOptions().num_parameters(2048));
  });
  check_same(
    "RNN", [] { return made<nn::RNN>(32, 48); }, 2);
  check_same(
    "GRU",
    [] {
      return made<nn::GRU>(
        nn::GRUOptions(32, 48).num_layers(2).bidirectional(true));
    },
    8);
  check_same(
    "LSTM",
    [] {
      return made<nn::LSTM>(nn::LSTMOptions(32, 48).num_layers(2).dropout(0.1));
    },
    4);
  check_same(
    "LSTMCell", [] { return made<nn::LSTMCell>(32, 48); }, 2);
  check_same(
    "AdaptiveLogSoftmaxWithLoss",
    [] {
      return made<nn::AdaptiveLogSoftmaxWithLoss>(
        64, 1000, std::vector<int64_t>{100, 300});
    },
    2);
}

TEST_CASE("attention and transformer layers come out bit-equal",
          "[runtime][delay]") {
  check_same(
    "MultiheadAttention", [] { return made<nn::MultiheadAttention>(48, 4); },
    2);
  check_same(
    "MultiheadAttention with other sizes",
    [] {
      return made<nn::MultiheadAttention>(
        nn::MultiheadAttentionOptions(48, 4).kdim(40).vdim(36).add_bias_kv(
          true));
    },
    3);
  check_same(
    "TransformerEncoderLayer",
    [] { return made<nn::TransformerEncoderLayer>(48, 4); }, 4);
  check_same(
    "TransformerDecoderLayer",
    [] { return made<nn::TransformerDecoderLayer>(48, 4); }, 6);
  check_same(
    "TransformerEncoder",
    [] {
      return made<nn::TransformerEncoder>(
        nn::TransformerEncoderLayer(nn::TransformerEncoderLayerOptions(48, 4)),
        3);
    },
    12);
  check_same(
    "Transformer",
    [] {
      return made<nn::Transformer>(
        nn::TransformerOptions(48, 4, 2, 2).dim_feedforward(96));
    },
    20);
}

// -- initialisers -------------------------------------------------------------

TEST_CASE("every initialiser of torch nn init comes out bit-equal",
          "[runtime][delay]") {
  using f = std::function<void(Tensor&)>;
  std::map<std::string, f> all = {
    {"constant_", [](Tensor& x) { init::constant_(x, 0.5); }},
    {"eye_", [](Tensor& x) { init::eye_(x); }},
    {"kaiming_normal_", [](Tensor& x) { init::kaiming_normal_(x); }},
    {"kaiming_uniform_",
     [](Tensor& x) { init::kaiming_uniform_(x, std::sqrt(5)); }},
    {"normal_", [](Tensor& x) { init::normal_(x, 1.0, 0.02); }},
    {"ones_", [](Tensor& x) { init::ones_(x); }},
    {"orthogonal_", [](Tensor& x) { init::orthogonal_(x, 2.0); }},
    {"sparse_", [](Tensor& x) { init::sparse_(x, 0.3); }},
    {"uniform_", [](Tensor& x) { init::uniform_(x, -1, 2); }},
    {"xavier_normal_", [](Tensor& x) { init::xavier_normal_(x); }},
    {"xavier_uniform_", [](Tensor& x) { init::xavier_uniform_(x); }},
    {"zeros_", [](Tensor& x) { init::zeros_(x); }},
  };
  for (auto& [name, f] : all)
    for (auto rows : {40, 50})
      check_custom(name, [&f = f, rows](custom_impl& m) {
        f(m.parameter("w", torch::empty({rows, 45})));
        m.parameter("after", torch::randn({3}));
      });
  check_custom("dirac_", [](custom_impl& m) {
    init::dirac_(m.parameter("w", torch::empty({16, 16, 5})));
  });
}

TEST_CASE("initialisers of one's own come out bit-equal", "[runtime][delay]") {
  torch::NoGradGuard no_grad;
  check_custom(
    "random factories",
    [](custom_impl& m) {
      m.parameter("a", torch::randn({40, 41}) * 0.02);
      m.parameter("b", torch::rand({40, 41}).sub_(0.5));
      m.buffer("c", torch::randint(0, 1000, {2000}));
      m.buffer("d", torch::randperm(3000));
      m.parameter("e",
                  torch::randn_like(m.parameter("f", torch::ones({2000}))));
      m.parameter("g", torch::normal(1.0, 2.0, {50, 50}));
      m.parameter("h", torch::randn({15}, torch::kDouble));
    },
    6);
  check_custom(
    "sizes around the vectorised path",
    [](custom_impl& m) {
      for (int64_t n : {1025, 1039, 1040, 1041, 2047}) {
        m.parameter("normal" + std::to_string(n), torch::empty({n})).normal_();
        m.parameter("double" + std::to_string(n),
                    torch::empty({n}, torch::kDouble))
          .normal_(0, 2);
        m.parameter("bernoulli" + std::to_string(n), torch::empty({n}))
          .bernoulli_(0.3);
      }
    },
    15);
}

TEST_CASE("tensors that are written into or made of others come out bit-equal",
          "[runtime][delay]") {
  torch::NoGradGuard no_grad;
  check_custom("writes through data, views and slices", [](custom_impl& m) {
    auto w = m.parameter("w", torch::empty({64, 64}));
    w.normal_();
    w.data().mul_(0.5);
    w[0].zero_();
    w.slice(0, 3, 9).fill_(7);
    w.t().narrow(0, 1, 2).uniform_(2, 3);
    w.detach().view({-1}).slice(0, 100, 4000, 3).add_(1);
    w.index_put_({torch::indexing::Slice(10, 12), 5}, -1);
    w.select(1, 7).copy_(torch::arange(64));
    w.diagonal().normal_(); // with strides
    w.masked_fill_(w > 1.5, 0.25);
    w.div_(w.norm());
  });
  check_custom(
    "one tensor made from others",
    [](custom_impl& m) {
      auto a = m.parameter("a", torch::randn({50, 50}));
      auto b = m.parameter("b", torch::empty({50, 50}));
      b.copy_(a); // what `a` is now
      a.mul_(2);
      auto c = m.parameter("c", torch::cat({a, b}, 1).clamp(-1, 1));
      m.parameter("d", c.t().contiguous()).add_(b.repeat({2, 1}), 0.5);
      m.buffer("e", torch::stack({a, b}).sum(0));
      auto parts = c.chunk(2, 1);
      m.buffer("f", parts[1].clone());
      parts[0].zero_();
    },
    6);
  check_custom(
    "a table of positions",
    [](custom_impl& m) {
      auto position = torch::arange(0, 200).unsqueeze(1);
      auto factor = torch::exp(torch::arange(0, 64, 2)
                               * (-std::log(10000.0) / 64));
      auto table = torch::zeros({200, 64});
      using namespace torch::indexing;
      table.index_put_({Slice(), Slice(0, None, 2)}, (position * factor).sin());
      table.index_put_({Slice(), Slice(1, None, 2)}, (position * factor).cos());
      m.buffer("table", table.unsqueeze(0));
      m.buffer("mask", torch::full({70, 70}, -1e9).triu(1));
      m.buffer("causal", torch::ones({90, 90}, torch::kBool).tril());
    },
    3);
}

TEST_CASE("tensors that share or exchange memory come out bit-equal",
          "[runtime][delay]") {
  torch::NoGradGuard no_grad;
  check_custom(
    "memory that parameters share",
    [](custom_impl& m) {
      auto flat = m.buffer("flat", torch::empty({5000}));
      m.parameter("a", flat.slice(0, 0, 2000).view({40, 50}));
      m.parameter("b", flat.slice(0, 2000, 5000).view({60, 50}));
      flat.uniform_();
      m.named_parameters()["b"][3].fill_(9);
    },
    3);
  check_custom("set_data", [](custom_impl& m) {
    auto a = m.parameter("a", torch::randn({50, 50}));
    auto b = m.parameter("b", torch::randn({50, 50}));
    b.set_data(a.mul(3));
    b.add_(1);
    m.parameter("c", torch::randn({5})).set_data(a.flatten().data());
    m.parameter("d", torch::randn({2000})).set_data(torch::ones({3}));
  });
  check_custom(
    "another default dtype",
    [](custom_impl& m) {
      torch::set_default_dtype(caffe2::TypeMeta::Make<double>());
      m.parameter("a", torch::randn({50, 50}));
      torch::set_default_dtype(caffe2::TypeMeta::Make<float>());
      m.parameter("b", torch::randn({50, 50}));
    },
    2);
  check_custom(
    "lists of tensors",
    [](custom_impl& m) {
      std::vector<Tensor> xs{m.parameter("a", torch::randn({50, 50})),
                             m.parameter("b", torch::randn({50, 50}))};
      torch::_foreach_mul_(xs, 3);
      nn::utils::vector_to_parameters(
        nn::utils::parameters_to_vector(xs).mul_(2), xs);
    },
    2);
}

TEST_CASE("seeds set and generators used in the scope count",
          "[runtime][delay]") {
  torch::NoGradGuard no_grad;
  check_custom(
    "manual_seed",
    [](custom_impl& m) {
      m.parameter("a", torch::randn({2000}));
      torch::manual_seed(3);
      m.parameter("b", torch::randn({2000}));
      torch::manual_seed(3);
      m.parameter("c", torch::randn({2000}));
    },
    3);
  check_custom(
    "a generator that is put back",
    [](custom_impl& m) {
      auto generator = at::detail::getDefaultCPUGenerator();
      auto state = generator.get_state();
      m.parameter("a", torch::randn({2001}));
      generator.set_state(state);
      m.parameter("b", torch::randn({2001}));
    },
    2);
  check_custom(
    "a generator of one's own",
    [](custom_impl& m) {
      auto generator = at::detail::createCPUGenerator(4);
      auto a = m.parameter("a", torch::empty({2000}));
      a.normal_(0, 1, generator);
      m.parameter("b", torch::empty({2001})).uniform_(0, 1, generator);
      a.uniform_(0, 1, at::detail::getDefaultCPUGenerator());
      m.parameter("c", torch::randn({2000}, generator));
    },
    3);
  check_custom(
    "ordinary tensors in between",
    [](custom_impl& m) {
      m.parameter("a", torch::randn({2000}));
      m.parameter("b", torch::randn({2}));
      m.parameter("c", torch::randn({2000}));
    },
    2);
}

TEST_CASE("models with an initialiser of their own come out bit-equal",
          "[runtime][delay]") {
  // As GPT models do it: first all layers, then other numbers for all.
  auto initialise = [](nn::Module& m) {
    torch::NoGradGuard no_grad;
    if (auto* x = m.as<nn::Linear>()) {
      x->weight.normal_(0, 0.02);
      if (x->bias.defined())
        x->bias.zero_();
    } else if (auto* x = m.as<nn::Embedding>()) {
      init::normal_(x->weight, 0, 0.02);
    }
  };
  auto net = [&] {
    nn::Sequential seq{nn::Embedding(50, 64),
                       nn::LayerNorm(nn::LayerNormOptions({64})),
                       nn::Linear(64, 256), nn::GELU(), nn::Linear(256, 64)};
    seq->apply(initialise);
    return seq.ptr();
  };
  check_same("apply", net, 3);
  check_same("tied weights", [] {
    struct tied : nn::Module {
      tied() {
        register_module("in", in);
        register_parameter("out", in->weight);
        init::normal_(in->weight);
      }
      nn::Embedding in{50, 64};
    };
    return std::make_shared<tied>();
  });
  check_same(
    "to another dtype",
    [&] {
      auto m = net();
      m->to(torch::kDouble);
      return m;
    },
    3);
  check_same(
    "clone", [&] { return net()->clone(); }, 3);
}

TEST_CASE("initialisers that run after the scope are still captured",
          "[runtime][delay]") {
  auto make = [](bool delay) {
    torch::manual_seed(2);
    nn::Linear x{nullptr};
    {
      delay_param_initialization scope{delay};
      x = nn::Linear{64, 64};
    }
    init::orthogonal_(x->weight);
    torch::NoGradGuard no_grad;
    x->weight.uniform_();
    x->weight[0].fill_(3);
    return x;
  };
  auto expected = make(false);
  auto x = make(true);
  CHECK(is_deferred(x->weight));
  initialise_deferred({x->weight});
  CHECK(same_bits(x->weight, expected->weight));
}
