#include "tests/support/catch.hpp"

#include "tests/support/nothing_left.hpp"
#include "tests/support/torch/two_ranks.hpp"

#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include <fmt/format.h>

#include <chrono>

// Fast mode by what can be counted: waits, requests, bytes (R38, R39).

using namespace smp;
using namespace smp::test;
using torch::nn::Linear;

namespace {

constexpr int64_t width = 64;
constexpr uint64_t tensor_bytes = width * width * sizeof(float);

/// What the last of several steps did, on all ranks together.
struct counted {
  uint64_t waits = 0;
  uint64_t transfers = 0; // tensors that crossed
  uint64_t requests = 0;
  uint64_t messages = 0; // of any kind
  uint64_t replayed = 0; // ranks
  Tensor loss;
  named_tensors gradients;
};

/// Tells whether the step waited n times, and at most once more in each phase:
/// an answer may come after the content that it tells of, from another rank.
bool waits(const counted& x, uint64_t n) {
  UNSCOPED_INFO(x.waits << " waits, expected " << n);
  return x.waits >= n && x.waits <= n + 2;
}

virtual_world_options world_of(uint64_t ranks, bool fast) {
  auto result = manual_world(ranks);
  result.config.fast_mode = fast;
  // Counts are those of messages that come in order.
  result.reorder = false;
  return result;
}

/// Runs steps of `Model`, whose forward returns what is summed up.
template <class Model, class Make>
counted count(const virtual_world_options& world, uint64_t ranks, Make make,
              int steps = 3) {
  counted result;
  std::mutex mutex;
  run_virtual_world(ranks, world, [&](session& s) {
    distributed_model<Model> model{seeded(make)};
    auto train_step = step([&](Tensor x) {
      auto loss = model(x).sum();
      model.backward(loss);
      return loss;
    });
    auto x = torch::sin(torch::arange(width * width * 1.0))
               .view({width, width});
    for (int i = 0; i < steps; ++i) {
      for (auto& p : model.local_parameters())
        p.mutable_grad() = Tensor{};
      auto& fabric = s.internals().fabric();
      auto before = fabric.stats().messages_sent;
      auto loss = train_step(x.to(torch::kFloat)).reduce_mean();
      auto messages = fabric.stats().messages_sent - before;
      barrier();
      check_nothing_left(s);
      auto gradients = model.gradients();
      auto stats = s.last_step();
      std::unique_lock guard{mutex};
      if (i < steps - 1)
        continue;
      result.replayed += stats.replayed;
      result.waits += stats.waits;
      result.transfers += stats.bytes_sent; // for now
      result.requests += stats.requests;
      result.messages += messages;
      if (s.rank() == 0) {
        result.loss = loss;
        result.gradients = std::move(gradients);
      }
    }
  });
  result.transfers /= tensor_bytes;
  return result;
}

bool equal(const counted& a, const counted& b) {
  if (!torch::equal(a.loss, b.loss) || a.gradients.size() != b.gradients.size())
    return false;
  for (size_t i = 0; i < a.gradients.size(); ++i)
    if (!torch::allclose(a.gradients[i].second, b.gradients[i].second, 1e-5,
                         1e-6))
      return false;
  return true;
}

/// Children on the ranks of a list, one after the other.
struct chain_impl : torch::nn::Module {
  explicit chain_impl(const std::vector<uint32_t>& ranks)
    : here(register_parameter("here", torch::full({1}, 1.5))) {
    for (auto rank : ranks) {
      partition_scope on{rank};
      layers.emplace_back(width, width);
      register_module(fmt::format("layer{}", layers.size()), layers.back());
    }
  }

  Tensor forward(Tensor x) {
    x = x * here;
    for (auto& layer : layers)
      x = layer(x);
    return x * here;
  }

  Tensor here;
  std::vector<submodule<Linear>> layers;
};
TORCH_MODULE_IMPL(chain, chain_impl);

counted count_chain(bool fast, const std::vector<uint32_t>& ranks,
                    std::vector<std::string> no_promises = {}) {
  auto world = world_of(3, fast);
  world.config.no_promises = std::move(no_promises);
  return count<chain>(world, 3, [&] { return chain{ranks}; });
}

/// A chain in a module of its own.
struct deep_chain_impl : torch::nn::Module {
  deep_chain_impl() : inner(std::vector<uint32_t>(4, 1)) {
    register_module("inner", inner);
  }
  Tensor forward(Tensor x) {
    return inner(x);
  }
  chain inner;
};
TORCH_MODULE_IMPL(deep_chain, deep_chain_impl);

/// A layer with two inputs.
struct joint_impl : torch::nn::Module {
  joint_impl() {
    register_module("first", first);
    register_module("second", second);
  }
  Tensor forward(Tensor x, Tensor memory) {
    return first(x) + second(memory);
  }
  Linear first{width, width}, second{width, width};
};
TORCH_MODULE_IMPL(joint, joint_impl);

/// Every layer of the decoder uses the last result of the encoder.
struct encoder_decoder_impl : torch::nn::Module {
  encoder_decoder_impl()
    : here(register_parameter("here", torch::full({1}, 1.5))) {
    for (int i = 0; i < 6; ++i) {
      partition_scope on{1};
      encoder.emplace_back(width, width);
      register_module(fmt::format("encoder{}", i), encoder.back());
    }
    for (int i = 0; i < 6; ++i) {
      partition_scope on{2};
      decoder.emplace_back(submodule<joint>{});
      register_module(fmt::format("decoder{}", i), decoder.back());
    }
  }

  Tensor forward(Tensor x) {
    auto memory = x * here;
    auto y = x.t() * here;
    for (auto& layer : encoder)
      memory = layer(memory);
    for (auto& layer : decoder)
      y = layer(y, memory);
    return y;
  }

  Tensor here;
  std::vector<submodule<Linear>> encoder;
  std::vector<submodule<joint>> decoder;
};
TORCH_MODULE_IMPL(encoder_decoder, encoder_decoder_impl);

/// One child of a Sequential on each of four ranks.
struct stages_impl : torch::nn::Module {
  stages_impl() {
    for (uint32_t rank = 0; rank < 4; ++rank) {
      layers->push_back(Linear{width, width});
      set_partition(*layers->ptr(rank), rank);
    }
    register_module("layers", layers);
  }

  Tensor forward(Tensor x) {
    return layers->forward(x);
  }

  torch::nn::Sequential layers;
};
TORCH_MODULE_IMPL(stages, stages_impl);

/// x + layer(x) outside of the layer, all on one rank.
struct residual_impl : torch::nn::Module {
  residual_impl() : here(register_parameter("here", torch::full({1}, 1.5))) {
    for (int i = 0; i < 6; ++i) {
      partition_scope on{1};
      layers.emplace_back(width, width);
      register_module(fmt::format("layer{}", i), layers.back());
    }
  }

  Tensor forward(Tensor x) {
    x = layers[0](x * here);
    for (auto& layer : layers)
      x = x + layer(x);
    return x;
  }

  Tensor here;
  std::vector<submodule<Linear>> layers;
};
TORCH_MODULE_IMPL(residual, residual_impl);

} // namespace

TEST_CASE(
  "a chain on one rank waits once for each phase and moves two tensors "
  "each",
  "[runtime][fast]") {
  std::vector<uint32_t> ranks(6, 1);
  auto slow = count_chain(false, ranks);
  auto fast = count_chain(true, ranks);
  CHECK(slow.waits == 12);
  CHECK(slow.transfers == 24);
  CHECK(waits(fast, 2));
  CHECK(fast.transfers == 4);
  CHECK(fast.requests == slow.requests);
  CHECK(equal(slow, fast));
}

TEST_CASE("a chain that alternates between two ranks moves each result once",
          "[runtime][fast]") {
  std::vector<uint32_t> ranks{1, 2, 1, 2, 1, 2};
  auto slow = count_chain(false, ranks);
  auto fast = count_chain(true, ranks);
  CHECK(slow.waits == 12);
  CHECK(slow.transfers == 24);
  CHECK(waits(fast, 2));
  CHECK(fast.transfers == 14); // n + 1 in each phase
  CHECK(equal(slow, fast));
}

TEST_CASE("a Sequential over several ranks waits once for each phase",
          "[runtime][fast]") {
  auto make = [] { return stages{}; };
  auto slow = count<stages>(world_of(4, false), 4, make);
  auto fast = count<stages>(world_of(4, true), 4, make);
  CHECK(slow.waits == 6);
  CHECK(slow.transfers == 12);
  CHECK(waits(fast, 2));
  CHECK(fast.transfers == 8); // one from rank to rank, the last one to rank 0
  CHECK(equal(slow, fast));
}

TEST_CASE("what the caller needs comes with the answer", "[runtime][fast]") {
  auto make = [] { return chain{std::vector<uint32_t>(6, 1)}; };
  // The second step calls without waiting and finds out what it needs.
  auto second = count<chain>(world_of(2, true), 2, make, 2);
  auto third = count<chain>(world_of(2, true), 2, make, 3);
  CHECK(waits(second, 2));
  CHECK(waits(third, 2));
  CHECK(second.requests == third.requests);
  CHECK(second.transfers == third.transfers);
  // Two less: who fetches asks and gets.
  CHECK(third.messages == second.messages - 2);
  CHECK(equal(second, third));
  // As many as there would be if calls waited.
  CHECK(third.messages
        == count<chain>(world_of(2, false), 2, make, 3).messages);
}

TEST_CASE("a replayed chain waits as often as without the record",
          "[runtime][fast][static][R33]") {
  std::vector<uint32_t> ranks{1, 2, 1, 2, 1, 2};
  auto slow = count_chain(false, ranks);
  auto world = world_of(3, true);
  world.config.static_mode = true;
  world.config.static_steps = 1; // and those that learn what calls return
  auto make = [&] { return chain{ranks}; };
  SECTION("one microbatch") {
    auto fast = count<chain>(world, 3, make, 5);
    CHECK(fast.replayed == 3);
    CHECK(waits(fast, 2));
    CHECK(fast.transfers == 14);
    CHECK(fast.requests == slow.requests);
    CHECK(equal(slow, fast));
  }
  SECTION("several, whose messages overtake each other") {
    world.config.microbatches = 4;
    world.reorder = true;
    for (world.seed = 1; world.seed <= 20; ++world.seed) {
      CAPTURE(world.seed);
      auto fast = count<chain>(world, 3, make, 6);
      CHECK(fast.replayed == 3);
      // Answers may come after the content that they tell of.
      CHECK(fast.waits <= 4 * 4);
      CHECK(fast.requests == 4 * slow.requests);
    }
  }
}

TEST_CASE("an encoder and a decoder on two ranks wait three times",
          "[runtime][fast]") {
  auto make = [] { return encoder_decoder{}; };
  auto slow = count<encoder_decoder>(world_of(3, false), 3, make);
  auto fast = count<encoder_decoder>(world_of(3, true), 3, make);
  CHECK(slow.waits == 24);
  CHECK(waits(fast, 3));
  // Two inputs and the result, the memory once between the ranks, and the same
  // of gradients.
  CHECK(fast.transfers == 8);
  CHECK(equal(slow, fast));
}

TEST_CASE("residuals outside of their layers are added where the layers are",
          "[runtime][fast]") {
  auto make = [] { return residual{}; };
  auto slow = count<residual>(world_of(2, false), 2, make);
  auto fast = count<residual>(world_of(2, true), 2, make);
  CHECK(slow.waits == 14);
  CHECK(waits(fast, 2));
  CHECK(fast.transfers == 4);
  CHECK(equal(slow, fast));
}

TEST_CASE("modules of smp.no_promises wait for their results",
          "[runtime][fast]") {
  std::vector<uint32_t> ranks(4, 1);
  auto fast = count_chain(true, ranks, {"layer2"});
  CHECK(waits(fast, 4));
  CHECK(equal(fast, count_chain(false, ranks)));
  try {
    count_chain(true, ranks, {"layer7"});
    FAIL("no error");
  } catch (const error& e) {
    CHECK(e.code() == error_code::config);
    CHECK(e.cause().text == "smp.no_promises: no module is called \"layer7\"; "
                            "the model has layer1, layer2, layer3, layer4");
  }
}

TEST_CASE("smp.no_promises covers what is below a module", "[runtime][fast]") {
  auto waits = [](std::vector<std::string> names) {
    auto world = world_of(3, true);
    world.config.no_promises = std::move(names);
    return count<deep_chain>(world, 3, [] { return deep_chain{}; }).waits;
  };
  CHECK(waits({}) == 2);
  CHECK(waits({"inner.layer2"}) == 4);
  CHECK(waits({"inner"}) == 8);
  CHECK(waits({"*", "!inner"}) == 2);
  CHECK(waits({"inner", "!inner", "inner.layer2"}) == 4);
  CHECK_THROWS_AS(waits({"inn"}), error);
}
