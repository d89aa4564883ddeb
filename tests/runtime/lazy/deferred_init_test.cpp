// ctest: timeout=300
#include "tests/support/catch.hpp"

#include "runtime/lazy/deferred_init.hpp"
#include "tests/support/torch_two_ranks.hpp"

#include <ATen/CPUGeneratorImpl.h>
#include <torch/torch.h>

#include <functional>
#include <map>
#include <sstream>
#include <string>
#include <vector>

using namespace smp;
using namespace smp::test;

namespace nn = torch::nn;
namespace init = torch::nn::init;

namespace {

using module_ptr = std::shared_ptr<nn::Module>;

/// All parameters and buffers with their names.
std::vector<std::pair<std::string, Tensor>> tensors_of(const nn::Module& m) {
  std::vector<std::pair<std::string, Tensor>> result;
  for (auto& x : m.named_parameters())
    result.emplace_back(x.key(), x.value());
  for (auto& x : m.named_buffers())
    result.emplace_back(x.key(), x.value());
  return result;
}

/// Says in words what is not the same in two tensors, "" if all is.
std::string metadata_difference(const Tensor& x, const Tensor& y) {
  std::ostringstream out;
  auto compare = [&out](const char* what, auto a, auto b) {
    if (a != b)
      out << what << ' ' << a << " is not " << b << "; ";
  };
  compare("sizes", x.sizes(), y.sizes());
  compare("strides", x.strides(), y.strides());
  compare("dtype", x.dtype(), y.dtype());
  compare("requires_grad", x.requires_grad(), y.requires_grad());
  compare("is_leaf", x.is_leaf(), y.is_leaf());
  compare("version", x._version(), y._version());
  return out.str();
}

bool same_bits(const Tensor& x, const Tensor& y) {
  return x.sizes() == y.sizes() && x.dtype() == y.dtype()
         && x.contiguous()
              .view(-1)
              .view(torch::kByte)
              .equal(y.contiguous().view(-1).view(torch::kByte));
}

/// Makes a module twice, and the second time in the scope. All tensors must
/// come out alike, in whatever order they are made, and the generator must
/// stand at the same number at any time.
template <class F>
void check_same(const std::string& name, F make, size_t at_least = 1) {
  INFO(name);
  torch::manual_seed(5);
  module_ptr eager = make();
  auto generator = random_stream::of_default();
  auto expected = tensors_of(*eager);
  for (auto order : {"forward", "backward", "at once"}) {
    INFO(order);
    torch::manual_seed(5);
    module_ptr model;
    {
      delay_param_initialization scope;
      model = make();
    }
    CHECK(random_stream::of_default() == generator);
    auto tensors = tensors_of(*model);
    REQUIRE(tensors.size() == expected.size());
    size_t deferred = 0;
    for (size_t i = 0; i < tensors.size(); ++i) {
      auto& [key, x] = tensors[i];
      INFO(key);
      CHECK(key == expected[i].first);
      CHECK(metadata_difference(x, expected[i].second) == "");
      deferred += is_deferred(x);
    }
    CHECK(deferred >= at_least);
    std::vector<Tensor> todo;
    for (auto& [key, x] : tensors)
      todo.push_back(x);
    if (order == std::string{"backward"})
      std::reverse(todo.begin(), todo.end());
    if (order == std::string{"at once"})
      initialise_deferred(todo);
    else
      for (auto& x : todo)
        initialise_deferred({x});
    CHECK(random_stream::of_default() == generator);
    for (size_t i = 0; i < tensors.size(); ++i) {
      auto& [key, x] = tensors[i];
      INFO(key);
      CHECK(!is_deferred(x));
      CHECK(same_bits(x, expected[i].second));
      CHECK(metadata_difference(x, expected[i].second) == "");
    }
  }
}

template <class Holder, class... Ts>
module_ptr made(Ts&&... xs) {
  return Holder(std::forward<Ts>(xs)...).ptr();
}

/// A module whose constructor is any code.
struct custom_impl : nn::Module {
  explicit custom_impl(const std::function<void(custom_impl&)>& f) {
    f(*this);
  }

  Tensor& parameter(const std::string& name, Tensor x) {
    return register_parameter(name, std::move(x));
  }

  Tensor& buffer(const std::string& name, Tensor x) {
    return register_buffer(name, std::move(x));
  }
};

void check_custom(const std::string& name,
                  const std::function<void(custom_impl&)>& f,
                  size_t at_least = 1) {
  check_same(
    name, [&f] { return std::make_shared<custom_impl>(f); }, at_least);
}

} // namespace

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

TEST_CASE("initialisers that run after the scope are still recorded",
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

// -- values inside of the scope -----------------------------------------------

TEST_CASE("code in the scope may read values", "[runtime][delay]") {
  torch::NoGradGuard no_grad;
  check_custom(
    "branches",
    [](custom_impl& m) {
      auto a = m.parameter("a", torch::randn({2000}));
      if (a.sum().item<float>() > 0)
        a.mul_(2);
      else
        a.mul_(3);
      if (a[7].lt(0).item<bool>())
        a[7] = 0;
      auto largest = a.argmax().item<int64_t>();
      a[largest].zero_();
      m.parameter("b", torch::randn({2000})).normal_();
      m.parameter("c", a.masked_select(a > 0));
    },
    2);
  check_custom("values that ordinary tensors take", [](custom_impl& m) {
    auto a = m.parameter("a", torch::randn({40, 50}));
    auto b = m.parameter("b", torch::zeros({50}));
    b.copy_(a.mean(0));
    b += a[3];
    m.buffer("c", a.nonzero().flatten().slice(0, 0, 20).clone());
  });
  // What was only read is not kept.
  delay_param_initialization scope;
  auto x = torch::randn({2000});
  auto largest = x.max().item<float>();
  CHECK(is_deferred(x));
  std::ostringstream out;
  out << x.slice(0, 0, 3);
  CHECK(is_deferred(x));
  CHECK(x.slice(0, 0, 3).allclose(x.slice(0, 0, 3).clone()));
  initialise_deferred({x});
  CHECK(x.max().item<float>() == largest);
}

TEST_CASE("a pointer to the data in the scope makes the tensor at once",
          "[runtime][delay]") {
  torch::NoGradGuard no_grad;
  check_custom(
    "writes through a pointer",
    [](custom_impl& m) {
      auto a = m.parameter("a", torch::randn({2000}));
      auto view = a.view({40, 50});
      a.data_ptr<float>()[3] = 7;
      view.accessor<float, 2>()[2][1] = 8;
      m.parameter("b", a.clone()).mul_(view.view({-1}));
      a.mul_(2); // `b` has what it was before
    },
    0);
  torch::manual_seed(4);
  auto expected = torch::randn({2000});
  torch::manual_seed(4);
  delay_param_initialization scope;
  auto a = torch::randn({2000});
  auto view = a.view({40, 50});
  REQUIRE(is_deferred(a));
  auto* data = a.data_ptr<float>();
  CHECK_FALSE(is_deferred(a));
  CHECK_FALSE(is_deferred(view));
  CHECK(view.data_ptr<float>() == data);
  CHECK(same_bits(a, expected));
}

TEST_CASE("what was copied in counts as it was then", "[runtime][delay]") {
  torch::NoGradGuard no_grad;
  auto outside = torch::arange(2000).to(torch::kFloat);
  auto* data = outside.data_ptr<float>();
  Tensor a, b;
  {
    delay_param_initialization scope;
    a = torch::empty({2000});
    a.copy_(outside);
    outside.mul_(2);
    b = torch::empty({2000});
    b.copy_(outside);
    data[1] = -1;
  }
  CHECK(is_deferred(a));
  CHECK(a[1].item<float>() == 1);
  CHECK(b[1].item<float>() == 2);
  CHECK(a[1999].item<float>() == 1999);
}

TEST_CASE("an inner scope can switch the delay off", "[runtime][delay]") {
  delay_param_initialization outer;
  CHECK(is_deferred(torch::zeros({2000})));
  {
    delay_param_initialization inner{false};
    CHECK_FALSE(is_deferred(torch::zeros({2000})));
    {
      delay_param_initialization again;
      CHECK(is_deferred(torch::zeros({2000})));
    }
    CHECK_FALSE(is_deferred(torch::zeros({2000})));
  }
  CHECK(is_deferred(torch::zeros({2000})));
}

TEST_CASE("errors in the scope are those of LibTorch", "[runtime][delay]") {
  using Catch::Matchers::ContainsSubstring;
  delay_param_initialization scope;
  nn::Linear x{64, 64};
  CHECK_THROWS_WITH(x->weight.mul_(2), ContainsSubstring("leaf Variable"));
  CHECK_THROWS_WITH(x->weight.add(torch::zeros({63})),
                    ContainsSubstring("must match the size"));
  torch::NoGradGuard no_grad;
  CHECK_THROWS_WITH(x->weight.view({-1, 3}), ContainsSubstring("invalid"));
}

// -- without a partition ------------------------------------------------------

TEST_CASE("a deferred model trains without smp as an ordinary one does",
          "[runtime][delay]") {
  auto run = [](bool delay) {
    torch::manual_seed(9);
    nn::Sequential model;
    {
      delay_param_initialization scope{delay};
      model = nn::Sequential{nn::Linear(64, 64), nn::BatchNorm1d(64),
                             nn::GELU(), nn::Linear(64, 64)};
    }
    torch::optim::AdamW adamw{model->parameters(), 1e-2};
    std::vector<Tensor> result;
    for (int i = 0; i < 3; ++i) {
      adamw.zero_grad();
      auto x = torch::randn({8, 64});
      auto loss = (model->forward(x) - x).pow(2).mean();
      loss.backward();
      adamw.step();
      result.push_back(loss.detach().view({1}));
    }
    for (auto& x : model->parameters())
      result.push_back(x.detach().flatten());
    return torch::cat(result);
  };
  CHECK(same_bits(run(true), run(false)));
}

TEST_CASE("backward through what was computed in the scope is refused",
          "[runtime][delay]") {
  Tensor w, scaled;
  {
    delay_param_initialization scope;
    w = torch::ones({2000}).requires_grad_();
    scaled = w * 2;
  }
  CHECK(is_deferred(scaled));
  CHECK(scaled.requires_grad());
  auto loss = scaled.sum();
  CHECK(loss.item<float>() == 4000);
  CHECK_THROWS_WITH(loss.backward(),
                    Catch::Matchers::ContainsSubstring(
                      "compute it in forward, or under torch::NoGradGuard"));
}

TEST_CASE("recordings as long as a large model's end without recursion",
          "[runtime][delay]") {
  torch::NoGradGuard no_grad;
  delay_param_initialization scope;
  auto x = torch::zeros({2000});
  constexpr int n = 200'000;
  for (int i = 0; i < n; ++i)
    x.add_(1);
  CHECK(is_deferred(x));
  auto y = x.clone();
  x.reset();
  y.reset();
}

// -- over ranks ---------------------------------------------------------------

namespace {

struct tower_impl : nn::Module {
  tower_impl() {
    register_module("in", in);
    register_module("body", body);
    register_module("out", out);
    register_buffer("scale", scale);
    register_parameter("tied", in->weight);
    torch::NoGradGuard no_grad;
    apply([](nn::Module& m) {
      if (auto* x = m.as<nn::Linear>())
        x->weight.normal_(0, 0.2);
    });
    in->weight[0].zero_();
  }

  Tensor forward(Tensor x) {
    return out(body->forward(in(x))) * scale.mean();
  }

  submodule<nn::Linear> in{64, 64};
  nn::Sequential body{nn::Linear(64, 64), nn::GELU(), nn::Linear(64, 64),
                      nn::BatchNorm1d(64), nn::Linear(64, 64)};
  submodule<nn::Linear> out{64, 64};
  Tensor scale = torch::rand({64, 64});
};
TORCH_MODULE_IMPL(tower, tower_impl);

struct tower_result {
  std::vector<Tensor> losses;
  std::map<std::string, Tensor> before, after;
};

tower_result train_tower(uint64_t ranks, bool delay) {
  tower_result result;
  virtual_world_options world;
  world.config.pipeline_parallel_degree = ranks;
  world.config.microbatches = 2;
  world.config.threads = 1;
  run_virtual_world(ranks, world, [&](session& s) {
    auto made = seeded([&] {
      delay_param_initialization scope{delay};
      return tower{};
    });
    size_t deferred = 0;
    for (auto& x : made->parameters())
      deferred += is_deferred(x);
    distributed_model model{made};
    torch::optim::AdamW adamw{model->parameters(), 1e-2};
    distributed_optimizer optimizer{adamw};
    auto train_step = step([&](Tensor x) {
      auto loss = (model(x) - x).pow(2).mean();
      model.backward(loss);
      return loss;
    });
    auto before = (model.partition(), model.state_dict());
    std::vector<Tensor> losses;
    for (int i = 0; i < 3; ++i) {
      optimizer.zero_grad();
      auto x = torch::arange(8 * 64).view({8, 64}).mul(7 + i).remainder(13)
               / 13;
      losses.push_back(train_step(x).reduce_mean());
      clip_grad_norm_(model, 1.0);
      optimizer.step();
    }
    auto after = model.state_dict();
    size_t left = 0;
    for (auto& x : made->parameters())
      left += is_deferred(x);
    if (left > 0 || (delay && deferred < 5))
      throw std::runtime_error{std::to_string(deferred) + " were deferred, "
                               + std::to_string(left) + " still are"};
    if (s.rank() == 0) {
      result.losses = losses;
      result.before = {before.begin(), before.end()};
      result.after = {after.begin(), after.end()};
    }
  });
  return result;
}

} // namespace

TEST_CASE("deferred and ordinary models train alike on 1, 2 and 4 ranks",
          "[runtime][delay]") {
  auto ranks = GENERATE(1u, 2u, 4u);
  CAPTURE(ranks);
  auto expected = train_tower(ranks, false);
  auto result = train_tower(ranks, true);
  REQUIRE(result.losses.size() == 3);
  for (size_t i = 0; i < 3; ++i)
    CHECK(same_bits(result.losses[i], expected.losses[i]));
  REQUIRE(result.before.size() == expected.before.size());
  for (auto& [name, x] : expected.before) {
    INFO(name);
    CHECK(same_bits(result.before.at(name), x));
    CHECK(same_bits(result.after.at(name), expected.after.at(name)));
  }
}

TEST_CASE("a rank makes only what it owns", "[runtime][delay]") {
  run_virtual_world(2, manual_world(), [](session& s) {
    nn::Linear near{nullptr}, far{nullptr};
    auto made = seeded([&] {
      delay_param_initialization scope;
      return caller{[](function_impl&, Tensor x) { return x; },
                    [](caller_impl& m, Tensor x) { return m.there(x); }};
    });
    // Small ones are ordinary, so give it large ones.
    Tensor here, there;
    {
      delay_param_initialization scope;
      here = made->register_parameter("large", torch::ones({5000}));
      there = made->there->register_parameter("large", torch::ones({5000}));
    }
    distributed_model model{made};
    model.partition();
    auto& mine = s.rank() == 0 ? here : there;
    auto& other = s.rank() == 0 ? there : here;
    if (is_deferred(mine) || is_deferred(other) || mine.storage().nbytes() == 0
        || other.storage().nbytes() != 0)
      throw std::runtime_error{"rank " + std::to_string(s.rank())
                               + " has other bytes than those that it owns"};
  });
}

TEST_CASE("values loaded before the partition stay", "[runtime][delay]") {
  run_virtual_world(2, manual_world(), [](session&) {
    auto made = seeded([&] {
      delay_param_initialization scope;
      auto x = caller{[](function_impl&, Tensor x) { return x; },
                      [](caller_impl& m, Tensor x) { return m.there(x); }};
      x->register_parameter("large", torch::randn({5000}));
      x->there->register_parameter("large", torch::randn({5000}));
      return x;
    });
    distributed_model model{made};
    named_tensors values;
    for (auto& [name, x] : tensors_of(*made))
      values.emplace_back(name, torch::full(x.sizes(), name.size()));
    model.load_state_dict(values);
    model.partition();
    for (auto& [name, x] : model.state_dict())
      if (!x.eq(static_cast<int64_t>(name.size())).all().item<bool>())
        throw std::runtime_error{name + " has another value"};
  });
}
