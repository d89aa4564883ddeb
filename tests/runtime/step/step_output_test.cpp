#include "tests/support/catch.hpp"

#include "tests/support/error_of.hpp"
#include "tests/support/torch/two_ranks.hpp"

#include <array>
#include <concepts>
#include <optional>
#include <string>
#include <tuple>
#include <unordered_map>

// What a step returns, and in which form.

using namespace smp;
using namespace smp::test;

namespace {

/// Fails the rank, and so the test: Catch2's macros are for its own thread.
void require(bool x, const std::string& what) {
  if (!x)
    throw std::runtime_error{"not true: " + what};
}

Tensor times_weight(function_impl& self, Tensor x) {
  return x * self.weight;
}

Tensor call_there(caller_impl& self, Tensor x) {
  return self.there(x * self.here);
}

auto make_caller() {
  return seeded([] { return caller{times_weight, call_there}; });
}

template <class T>
bool has(const Tensor& x, const std::vector<T>& expected) {
  return torch::equal(x, torch::tensor(expected));
}

} // namespace

TEST_CASE("numbers that microbatches return combine as numbers",
          "[runtime][step]") {
  run_virtual_world(2, manual_world(2, 4), [](session&) {
    distributed_model model{make_caller()};
    auto evaluate = step([&](Tensor x) {
      torch::NoGradGuard no_grad;
      auto k = x[0][0].item<int64_t>();
      std::map<std::string, double> shares{{"half", k * 0.5}};
      std::vector<int32_t> counts{static_cast<int32_t>(k), 2'000'000'000};
      return std::tuple{model(x), k, k > 1, std::pair{shares, counts}};
    });
    auto out = evaluate(torch::arange(4.0).view({4, 1}).expand({4, 3}));

    auto [y, k, large, nest] = out.reduce_mean();
    static_assert(std::same_as<decltype(k), double>);
    require(torch::allclose(y, torch::full({1, 3}, 3.0)), "mean of tensors");
    require(k == 1.5 && large == 0.5, "mean of whole numbers");
    require(nest.first.at("half") == 0.75, "mean in a map");
    require(nest.second == std::vector<double>{1.5, 2e9}, "mean in a vector");

    auto [y_sum, k_sum, large_sum, nest_sum] = out.reduce_sum();
    static_assert(std::same_as<decltype(large_sum), int64_t>);
    require(torch::allclose(y_sum, torch::full({1, 3}, 12.0)), "sum");
    require(k_sum == 6 && large_sum == 2, "sum of whole numbers");
    require(nest_sum.first.at("half") == 3, "sum in a map");
    require(nest_sum.second == std::vector<int64_t>{6, 8'000'000'000},
            "no overflow");

    auto [rows, ks, larges, nest_rows] = out.concat();
    require(rows.sizes() == torch::IntArrayRef({4, 3}), "concat");
    require(has<int64_t>(ks, {0, 1, 2, 3}), "concat of whole numbers");
    require(has<int64_t>(larges, {0, 0, 1, 1}), "concat of bools");
    require(torch::equal(nest_rows.first.at("half"),
                         torch::tensor({0.0, 0.5, 1.0, 1.5}, torch::kDouble)),
            "concat in a map");
    require(torch::equal(std::get<1>(out.stack()), ks), "stack");
  });
}

TEST_CASE("arrays, unordered maps and optionals combine element by element",
          "[runtime][step]") {
  run_virtual_world(2, manual_world(2, 4), [](session&) {
    distributed_model model{make_caller()};
    auto evaluate = step([&](Tensor x) {
      torch::NoGradGuard no_grad;
      auto k = model(x).sum().item<double>() * 0 + x[0][0].item<double>();
      std::unordered_map<std::string, Tensor> loss{{"a", torch::full({}, k)}};
      std::optional<double> none;
      std::optional<double> odd = k == 1 ? std::optional{k} : std::nullopt;
      return std::tuple{std::array{k, 2 * k}, loss, std::optional{k}, none,
                        odd};
    });
    auto out = evaluate(torch::arange(4.0).view({4, 1}).expand({4, 3}));
    auto told = error_of([&] { out.reduce_mean(); });
    require(told.find("only some microbatches returned a value") != told.npos,
            told);
    auto without_odd = step([&](Tensor x) {
      torch::NoGradGuard no_grad;
      auto k = model(x).sum().item<double>() * 0 + x[0][0].item<double>();
      std::unordered_map<std::string, Tensor> loss{{"a", torch::full({}, k)}};
      return std::tuple{std::array{k, 2 * k}, loss, std::optional{k},
                        std::optional<double>{}};
    });
    auto result = without_odd(torch::arange(4.0).view({4, 1}).expand({4, 3}));
    auto [pair, loss, some, none] = result.reduce_mean();
    require(pair == std::array{1.5, 3.0}, "mean in an array");
    require(loss.at("a").item<double>() == 1.5, "mean in an unordered map");
    require(some == 1.5 && !none, "mean in an optional");
  });
}

TEST_CASE("a step that returns a number has a mean", "[runtime][step]") {
  run_virtual_world(2, manual_world(2, 2), [](session&) {
    distributed_model model{make_caller()};
    auto count = step([&](Tensor x) {
      torch::NoGradGuard no_grad;
      return model(x).sum().item<double>();
    });
    auto out = count(torch::arange(2.0).view({2, 1}).expand({2, 3}));
    require(out.reduce_mean() == 3 && out.reduce_sum() == 6, "numbers");
    require(out.outputs() == std::vector<double>{0, 6}, "outputs");
  });
}

TEST_CASE("a rank with fewer microbatches than pp_rank 0 is told so",
          "[runtime][step]") {
  run_virtual_world(2, manual_world(), [](session& s) {
    auto body = [](int64_t k) { return k; };
    auto differs = step(body, {.microbatches = s.rank() == 0 ? 4u : 2u});
    auto told = error_of([&] { differs(int64_t{1}); }, error_code::config);
    require(told
              == (s.rank() == 0
                    ? "no error"
                    : "pp_rank 0 ran a step of 4 microbatches, rank 1 of 2: "
                      "all ranks of a pipeline must give a step the same "
                      "number (step_options::microbatches)"),
            told);
    // The session goes on.
    require(step(body)(int64_t{3}).reduce_sum() == 3, "the next step");
  });
}

TEST_CASE("results keep their graph only where they are told to",
          "[runtime][step][R16]") {
  run_virtual_world(2, manual_world(2, 2), [](session& s) {
    distributed_model model{make_caller()};
    auto x = torch::ones({2, 3});
    auto body = [&](Tensor x) { return std::pair{x * model->here, model(x)}; };
    auto detached = step(body)(x).reduce_sum();
    require(!detached.first.requires_grad(), "detached by default");

    auto keeps = step(body, {.detach_outputs = false, .no_rerun = true});
    {
      auto [local, remote] = keeps(x).reduce_sum();
      require(local.requires_grad() == (s.rank() == 0), "on pp_rank 0 only");
      require(torch::equal(local, torch::full({1, 3}, 4.0)), "values");
      if (s.rank() == 0) {
        local.sum().backward();
        require(has<float>(model->here.grad(), {2, 2, 2}), "its gradient");
        auto told = error_of([&, y = remote] { y.sum().backward(); });
        require(told.find("model.backward") != told.npos, told);
      }
    }
    pp_barrier();
    // The session goes on.
    require(
      torch::equal(step(body)(x).concat().second, torch::full({2, 3}, 2.0)),
      "the next step");
  });
}
