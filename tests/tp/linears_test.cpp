#include "tests/support/catch.hpp"

#include "runtime/base/autocast.hpp"
#include "tests/support/assertion_lock.hpp"
#include "tests/support/torch/thread_group.hpp"
#include "tp/linears.hpp"

#include <ATen/record_function.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/functional/linear.h>

#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

// Linears of which each peer has some of the inputs, or of the outputs, against
// whole ones.

using namespace smp;
using namespace smp::test;
using torch::Tensor;

namespace {

/// Outputs of a peer in `blocks` blocks, along the last axis of `x`.
Tensor part_of(const Tensor& x, uint64_t peer, uint64_t peers, int64_t blocks) {
  return x.unflatten(-1, {blocks, static_cast<int64_t>(peers), -1})
    .select(-2, static_cast<int64_t>(peer))
    .flatten(-2);
}

struct linears {
  int64_t blocks = 1;
  std::vector<Tensor> weights; // [out, in]
  std::vector<Tensor> biases;  // [out], or undefined
  bool inputs_first = false;   // as in memory
};

/// Compares results and all gradients. @returns most collectives at one time
int check(uint64_t peers, Tensor x, const linears& all, double tolerance) {
  auto near = [&](const Tensor& a, const Tensor& b) {
    assertion_lock guard;
    CHECK(a.sizes() == b.sizes());
    CHECK(torch::allclose(a, b, tolerance, tolerance));
  };
  x = x.detach().requires_grad_();
  std::vector<Tensor> weights, biases, results, seeds;
  for (size_t i = 0; i < all.weights.size(); ++i) {
    weights.push_back(all.weights[i].detach().requires_grad_());
    biases.push_back(all.biases[i].defined()
                       ? all.biases[i].detach().requires_grad_()
                       : Tensor{});
    results.push_back(
      torch::nn::functional::linear(x, weights.back(), biases.back()));
    seeds.push_back(torch::randn_like(results.back()));
  }
  torch::autograd::backward(results, seeds);

  thread_group group{peers};
  group.on_all([&](uint64_t i) {
    auto n = static_cast<int64_t>(peers);
    auto k = static_cast<int64_t>(i);
    auto mine = x.detach().chunk(n, -1)[k].contiguous().requires_grad_();
    std::vector<Tensor> leaves, ws, bs;
    for (size_t j = 0; j < weights.size(); ++j) {
      auto w = weights[j].detach().chunk(n, 1)[k];
      leaves.push_back((all.inputs_first ? w.t() : w)
                         .clone(at::MemoryFormat::Contiguous)
                         .requires_grad_());
      ws.push_back(all.inputs_first ? leaves.back().t() : leaves.back());
      auto b = biases[j].defined() ? biases[j].detach().clone() : Tensor{};
      if (b.defined() && i > 0)
        b = b.narrow(0, 0, 0).clone();
      bs.push_back(b.defined() ? b.requires_grad_() : b);
    }
    auto ys = nn::reduced_linears_for_tp(mine, ws, bs, all.blocks);
    std::vector<Tensor> theirs;
    for (size_t j = 0; j < ys.size(); ++j) {
      near(ys[j].detach(), part_of(results[j].detach(), i, peers, all.blocks));
      theirs.push_back(part_of(seeds[j], i, peers, all.blocks));
    }
    torch::autograd::backward(ys, theirs);
    near(mine.grad(), x.grad().chunk(n, -1)[k]);
    for (size_t j = 0; j < ys.size(); ++j) {
      auto whole = weights[j].grad().chunk(n, 1)[k];
      near(leaves[j].grad(), all.inputs_first ? whole.t() : whole);
      if (bs[j].defined() && i == 0)
        near(bs[j].grad(), biases[j].grad());
      assertion_lock guard;
      CHECK(leaves[j].grad().is_contiguous());
    }
  });
  return group.most_under_way();
}

linears random_linears(const std::vector<int64_t>& outputs, int64_t inputs,
                       at::ScalarType type) {
  linears result;
  for (auto n : outputs) {
    result.weights.push_back(torch::randn({n, inputs}, type));
    result.biases.push_back(torch::randn({n}, type));
  }
  return result;
}

} // namespace

TEST_CASE("linears that peers add up are those of one process",
          "[tp][linears]") {
  torch::manual_seed(3);
  uint64_t peers = GENERATE(1, 2, 4);
  auto x = random_linears({24, 12, 24}, 8, at::kDouble);
  x.blocks = GENERATE(1, 3);
  x.inputs_first = GENERATE(false, true);
  x.biases[1] = Tensor{};
  check(peers, torch::randn({3, 5, 8}, at::kDouble), x, 1e-9);
}

TEST_CASE("one of them travels while the next is computed", "[tp][linears]") {
  torch::manual_seed(3);
  SECTION("of several") {
    auto x = random_linears({8, 8, 8}, 4, at::kDouble);
    CHECK(check(2, torch::randn({3, 4}, at::kDouble), x, 1e-9) == 2);
  }
  SECTION("of one that is large, by rows that cannot be divided") {
    auto x = random_linears({1536}, 8, at::kDouble);
    x.blocks = GENERATE(1, 3);
    CHECK(check(2, torch::randn({1033, 8}, at::kDouble), x, 1e-9) == 2);
  }
  SECTION("not of one that is small") {
    auto x = random_linears({8}, 4, at::kDouble);
    CHECK(check(2, torch::randn({3, 4}, at::kDouble), x, 1e-9) == 1);
  }
}

TEST_CASE("linears that peers add up take no rows", "[tp][linears]") {
  auto x = random_linears({8, 8}, 4, at::kDouble);
  check(2, torch::randn({0, 3, 4}, at::kDouble), x, 1e-9);
}

TEST_CASE(
  "peers go backward together where one of them adds a bias that trains",
  "[tp][linears]") {
  thread_group group{2};
  group.on_all([](uint64_t i) {
    auto w = torch::ones({4, 2});
    auto b = torch::ones({i == 0 ? 4 : 0}).requires_grad_();
    auto y = nn::reduced_linears_for_tp(torch::ones({3, 2}), {&w, 1}, {&b, 1},
                                        1);
    y.front().sum().backward();
    assertion_lock guard;
    CHECK(b.grad().sum().item<double>() == (i == 0 ? 12 : 0));
  });
}

namespace {

Tensor leaf_of(const Tensor& x) {
  return x.detach().clone(at::MemoryFormat::Contiguous).requires_grad_();
}

/// Of what each peer has a part of. @param part gives that of a peer
template <class F>
Tensor joined(uint64_t peers, int64_t dim, F part) {
  std::vector<Tensor> parts;
  for (uint64_t i = 0; i < peers; ++i)
    parts.push_back(part(i).detach());
  return torch::cat(parts, dim);
}

/// Of what each peer has a summand of.
template <class F>
Tensor summed(uint64_t peers, F part) {
  auto result = part(0).detach().clone();
  for (uint64_t i = 1; i < peers; ++i)
    result += part(i).detach();
  return result;
}

void check_close(const Tensor& a, const Tensor& b) {
  REQUIRE(a.sizes() == b.sizes());
  CHECK(torch::allclose(a, b, 1e-9, 1e-9));
}

/// Linears of the samples of all peers: gives each peer its part of `all` and
/// of the seeds, and compares what comes with results and gradients of `x`.
/// @param same all peers have all samples
void check_entered(uint64_t peers, bool same, nn::entry how, Tensor x,
                   const linears& all) {
  auto n = static_cast<int64_t>(peers);
  auto by_outputs = how != nn::entry::exchange;
  x = leaf_of(x);
  std::vector<Tensor> weights, biases, results, seeds;
  for (size_t j = 0; j < all.weights.size(); ++j) {
    weights.push_back(leaf_of(all.weights[j]));
    biases.push_back(leaf_of(all.biases[j]));
    results.push_back(torch::nn::functional::linear(x, weights[j], biases[j]));
    seeds.push_back(torch::randn_like(results[j]));
  }
  torch::autograd::backward(results, seeds);
  auto of_peer = [&](const Tensor& y, int64_t dim, uint64_t i) {
    return y.detach().chunk(n, dim).at(i);
  };
  // By peer, and then by linear.
  std::vector<std::vector<Tensor>> found(peers), ws(peers), bs(peers);
  std::vector<Tensor> inputs(peers);
  thread_group group{peers, same};
  group.on_all([&](uint64_t i) {
    auto has_all = same || how == nn::entry::done;
    inputs[i] = leaf_of(has_all ? x : of_peer(x, 0, i));
    std::vector<Tensor> given;
    for (size_t j = 0; j < weights.size(); ++j) {
      ws[i].push_back(leaf_of(of_peer(weights[j], by_outputs ? 0 : 1, i)));
      bs[i].push_back(leaf_of(by_outputs ? of_peer(biases[j], 0, i)
                              : i == 0   ? biases[j]
                                         : biases[j].narrow(0, 0, 0)));
      given.push_back(by_outputs ? of_peer(seeds[j], -1, i) : seeds[j]);
    }
    found[i] = nn::linears_for_tp(inputs[i], how, ws[i], bs[i]);
    torch::autograd::backward(found[i], given);
  });
  for (size_t j = 0; j < weights.size(); ++j) {
    auto result = [&](uint64_t i) { return found[i].at(j); };
    auto weight = [&](uint64_t i) { return ws[i][j].grad(); };
    auto bias = [&](uint64_t i) { return bs[i][j].grad(); };
    check_close(by_outputs ? joined(peers, -1, result) : summed(peers, result),
                results[j].detach());
    check_close(joined(peers, by_outputs ? 0 : 1, weight), weights[j].grad());
    check_close(joined(peers, 0, bias), biases[j].grad());
  }
  auto gradient = [&](uint64_t i) { return inputs[i].grad(); };
  if (how == nn::entry::done)
    check_close(summed(peers, gradient), x.grad());
  else if (same)
    for (uint64_t i = 0; i < peers; ++i)
      check_close(gradient(i), x.grad());
  else
    check_close(joined(peers, 0, gradient), x.grad());
}

/// One linear, of whose inputs each peer has a part, and gets the results of
/// its samples. @returns most collectives at one time
int check_scattered(uint64_t peers, bool same, nn::entry how, Tensor x,
                    const linears& one) {
  auto n = static_cast<int64_t>(peers);
  x = leaf_of(x);
  auto weight = leaf_of(one.weights.at(0));
  auto bias = leaf_of(one.biases.at(0));
  auto y = torch::nn::functional::linear(x, weight, bias);
  auto seed = torch::randn_like(y);
  y.backward(seed);
  auto part = [&](const Tensor& t, int64_t dim, uint64_t i) {
    return t.detach().chunk(n, dim).at(i);
  };
  auto of_samples = [&](const Tensor& t, uint64_t i) {
    return same ? t.detach() : part(t, 0, i);
  };
  auto input = [&](const Tensor& t, uint64_t i) {
    return how == nn::entry::done ? part(t, -1, i) : of_samples(t, i);
  };
  std::vector<Tensor> xs(peers), ws(peers), bs(peers), ys(peers);
  thread_group group{peers, same};
  group.on_all([&](uint64_t i) {
    xs[i] = leaf_of(input(x, i));
    ws[i] = leaf_of(part(weight, 1, i));
    bs[i] = leaf_of(i == 0 ? bias : bias.narrow(0, 0, 0));
    auto result = nn::scattered_linear_for_tp(xs[i], how, ws[i], bs[i]);
    result.backward(of_samples(seed, i));
    ys[i] = result.detach();
  });
  for (uint64_t i = 0; i < peers; ++i) {
    check_close(ys[i], of_samples(y, i));
    check_close(xs[i].grad(), input(x.grad(), i));
    check_close(ws[i].grad(), part(weight.grad(), 1, i));
  }
  check_close(bs[0].grad(), bias.grad());
  return group.most_under_way();
}

/// Products that were computed on this thread while a collective was on its
/// way.
thread_local int products_meanwhile = 0;

std::unique_ptr<at::ObserverContext> note_product(const at::RecordFunction& x) {
  if (std::string_view{x.name()} == "aten::mm" && thread_group::under_way() > 0)
    ++products_meanwhile;
  return nullptr;
}

} // namespace

TEST_CASE("linears of the samples of all peers are those of one process",
          "[tp][linears]") {
  torch::manual_seed(4);
  uint64_t peers = GENERATE(1, 2, 4);
  auto same = GENERATE(false, true);
  auto how = GENERATE(nn::entry::gather, nn::entry::exchange, nn::entry::done);
  CAPTURE(peers, same, static_cast<int>(how));
  check_entered(peers, same, how, torch::randn({8, 3, 8}, at::kDouble),
                random_linears({12, 4}, 8, at::kDouble));
}

TEST_CASE(
  "the gradient of an input travels while those of weights are computed",
  "[tp][linears]") {
  auto same = GENERATE(false, true);
  auto how = GENERATE(nn::entry::gather, nn::entry::exchange);
  CAPTURE(same, static_cast<int>(how));
  thread_group group{2, same};
  group.on_all([&](uint64_t) {
    auto x = torch::randn({4, 8}).requires_grad_();
    auto inputs = how == nn::entry::gather ? 8 : 4;
    std::vector<Tensor> ws;
    for (int i = 0; i < 3; ++i)
      ws.push_back(torch::randn({6, inputs}).requires_grad_());
    const std::vector<Tensor> none(3);
    auto ys = nn::linears_for_tp(x, how, ws, none);
    std::vector<Tensor> seeds;
    for (auto& y : ys)
      seeds.push_back(torch::ones_like(y));
    products_meanwhile = 0;
    auto handle = at::addThreadLocalCallback(
      at::RecordFunctionCallback{&note_product});
    torch::autograd::backward(ys, seeds);
    at::removeCallback(handle);
    assertion_lock guard;
    CHECK(products_meanwhile == 3);
  });
}

TEST_CASE("a linear gives each peer the results of its samples",
          "[tp][linears]") {
  torch::manual_seed(5);
  uint64_t peers = GENERATE(1, 2, 4);
  auto same = GENERATE(false, true);
  auto how = GENERATE(nn::entry::exchange, nn::entry::done);
  CAPTURE(peers, same, static_cast<int>(how));
  CHECK(check_scattered(peers, same, how, torch::randn({8, 3, 8}, at::kDouble),
                        random_linears({12}, 8, at::kDouble))
        == 1);
}

// Of 521 or 1042 rows of each peer, which four segments cannot divide.
TEST_CASE("large linears of all peers are computed by segments",
          "[tp][linears]") {
  torch::manual_seed(6);
  uint64_t peers = GENERATE(2, 4);
  auto same = GENERATE(false, true);
  CAPTURE(peers, same);
  SECTION("that are gathered") {
    check_entered(peers, same, nn::entry::gather,
                  torch::randn({4, 521, 1028}, at::kDouble),
                  random_linears({8, 4}, 1028, at::kDouble));
  }
  SECTION("that are scattered") {
    auto how = GENERATE(nn::entry::exchange, nn::entry::done);
    CAPTURE(static_cast<int>(how));
    auto most = check_scattered(peers, same, how,
                                torch::randn({4, 521, 8}, at::kDouble),
                                random_linears({1028}, 8, at::kDouble));
    CHECK(most == (how == nn::entry::exchange && !same ? 3 : 2));
  }
}

namespace {

/// Runs `f` on two peers, forward and backward.
/// @param forward,backward how many products are computed while something is
/// on its way
template <class F>
void check_products(bool same, int forward, int backward, F f) {
  thread_group group{2, same};
  group.on_all([&](uint64_t) {
    products_meanwhile = 0;
    auto handle = at::addThreadLocalCallback(
      at::RecordFunctionCallback{&note_product});
    auto y = f();
    auto before = std::exchange(products_meanwhile, 0);
    y.backward(torch::ones_like(y));
    at::removeCallback(handle);
    assertion_lock guard;
    CHECK(before == forward);
    CHECK(products_meanwhile == backward);
  });
}

} // namespace

// Four segments of 2066 rows in all. Of the products in backward, one is the
// gradient of the weight.
TEST_CASE("one segment of a linear travels while another is multiplied",
          "[tp][linears]") {
  auto same = GENERATE(false, true);
  CAPTURE(same);
  const int64_t rows = same ? 2066 : 1033;
  SECTION("of what comes") {
    check_products(same, same ? 0 : 3, 4, [&] {
      auto x = torch::ones({rows, 2048}).requires_grad_();
      auto w = torch::ones({6, 2048}).requires_grad_();
      Tensor none;
      return nn::linears_for_tp(x, nn::entry::gather, {&w, 1}, {&none, 1})
        .front();
    });
  }
  SECTION("of what leaves") {
    check_products(same, 3, same ? 0 : 3, [] {
      auto x = torch::ones({2066, 4}).requires_grad_();
      auto w = torch::ones({2048, 4}).requires_grad_();
      return nn::scattered_linear_for_tp(x, nn::entry::done, w, {});
    });
  }
  SECTION("of what comes and leaves") {
    check_products(same, same ? 3 : 4, same ? 4 : 5, [&] {
      auto x = torch::ones({rows, 8}).requires_grad_();
      auto w = torch::ones({2048, 4}).requires_grad_();
      return nn::scattered_linear_for_tp(x, nn::entry::exchange, w, {});
    });
  }
}
