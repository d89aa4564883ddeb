#include "tests/support/catch.hpp"

#include "partition/partitioner.hpp"
#include "partition/search/paper.hpp"
#include "partition/search/segment.hpp"
#include "tests/support/cpu_time.hpp"
#include "tests/support/error_of.hpp"
#include "tests/support/naive_partition.hpp"
#include "tests/support/partition_models.hpp"
#include "tests/support/t5_tree.hpp"

#include "transport/error.hpp"

#include <cmath>
#include <set>

using namespace smp;
using namespace smp::test;

namespace {

using devices = std::vector<uint32_t>;

partition_plan plan_of(const model_info& model, uint32_t num_devices,
                       double memory_weight = 1) {
  partition_options options;
  options.manual.devices = num_devices;
  options.memory_weight = memory_weight;
  options.strategy = partition_strategy::paper;
  return make_partition(model, options);
}

std::vector<size_t> ends_of(const std::vector<exact_cost>& costs,
                            size_t parts) {
  std::vector<exact_cost> prefix{0};
  for (auto x : costs)
    prefix.push_back(prefix.back() + x);
  return min_max_split(prefix, parts);
}

/// The device of each layer of a T5 stack; all modules of a layer must agree.
devices layers(const model_info& model, const partition_plan& plan,
               const std::string& stack) {
  devices result;
  for (int i = 0; i < 24; ++i) {
    auto path = stack + ".block." + std::to_string(i);
    std::set<uint32_t> seen;
    for (size_t k = 0; k < model.size(); ++k)
      if (model[k].path == path || model[k].path.starts_with(path + "."))
        seen.insert(plan.module_device[k]);
    REQUIRE(seen.size() == 1);
    result.push_back(*seen.begin());
  }
  return result;
}

devices runs(std::vector<std::pair<uint32_t, int>> xs) {
  devices result;
  for (auto& [device, times] : xs)
    result.insert(result.end(), times, device);
  return result;
}

/// Rounds as the paper prints.
double three_digits(double x) {
  return std::round(x * 1000) / 1000;
}

} // namespace

// -- costs --------------------------------------------------------------------

TEST_CASE("a module's own cost counts once, not once per ancestor",
          "[partition][paper][A1]") {
  auto plan = plan_of(make_model({{"", {1}, 1}, {"a", {2}, 2}, {"b", {}, 5}}),
                      2);
  CHECK(plan.costs.share(plan.costs.own(1)) == 0.25);
  CHECK(plan.costs.share(plan.costs.subtree(1)) == 0.875);
  CHECK(plan.loads[0] + plan.loads[1] == 1);
}

TEST_CASE("memory and compute weigh by their share, whatever their units",
          "[partition][paper][A2]") {
  // a holds three quarters of the memory, b four fifths of the time.
  auto model = make_model({{"", {1, 2}}, {"a", {}, 3e9, 1}, {"b", {}, 1e9, 4}});
  auto share = [&](double alpha) {
    auto plan = plan_of(model, 2, alpha);
    return plan.costs.share(plan.costs.own(1));
  };
  CHECK(share(1) == 0.75);
  CHECK(share(0) == Catch::Approx(0.2));
  CHECK(share(0.2) == Catch::Approx(0.2 * 0.75 + 0.8 * 0.2));
}

TEST_CASE("a module contains only the parameters that it owns itself",
          "[partition][paper][A3]") {
  auto model = make_model({{"", {1, 3}},
                           {"a", {2}},
                           {"a.b", {}, 0, 0, {"w"}},
                           {"c", {}, 0, 0, {"w"}}});
  module_tree tree{model};
  CHECK(tree.node_of(module_id{1}) != tree.node_of(module_id{3}));
  CHECK(tree.node_of(module_id{2}) == tree.node_of(module_id{3}));
}

TEST_CASE("a shared parameter counts once for each module that owns it",
          "[partition][paper][A4]") {
  auto model = make_model({{"", {1, 2, 3}},
                           {"embed", {}, 0, 0, {"w"}},
                           {"body", {}, 100, 0},
                           {"head", {}, 0, 0, {"w"}}});
  model[1].parameters[0].elements = 50;
  model[3].parameters[0].elements = 50;
  auto plan = plan_of(model, 2);
  CHECK(plan.costs.share(plan.costs.own(1)) == 0.5);
}

TEST_CASE("without times each module counts one", "[partition][paper]") {
  auto model = make_model({{"", {1, 2}}, {"a", {3}}, {"b", {}}, {"c", {}}});
  for (auto& x : model)
    x.compute.reset();
  auto plan = plan_of(model, 2, 0);
  CHECK(plan.costs.share(plan.costs.own(0)) == 0.25);
  CHECK(plan.costs.share(plan.costs.subtree(1)) == 0.5);
}

TEST_CASE("costs with decimals are exact, costs without limit are scaled",
          "[partition][paper]") {
  CHECK(to_integers({0.1, 0.2, 0.3}) == std::vector<uint64_t>{1, 2, 3});
  CHECK(to_integers({1, 2.25}) == std::vector<uint64_t>{100, 225});
  CHECK(to_integers({0, 0}) == std::vector<uint64_t>{0, 0});
  CHECK(to_integers({1e9 / 3, 2}).size() == 2);
  auto xs = to_integers({3e30, 1e30});
  CHECK(static_cast<double>(xs[0]) / static_cast<double>(xs[1])
        == Catch::Approx(3));
  CHECK(xs[0] + xs[1] < uint64_t{1} << 48);
}

TEST_CASE("a cost that is none is an error that names the module",
          "[partition][paper]") {
  auto message = [](model_info model, double alpha) {
    return cause_of([&] { plan_of(model, 2, alpha); }, error_code::config);
  };
  auto model = make_model({{"", {1}, 1, 1}, {"a", {}, 1, 1}});
  CHECK(message(model, 1.5).find("smp.memory_weight") == 0);
  CHECK(message(model, std::nan("")).find("smp.memory_weight") == 0);
  model[1].activations = -1;
  CHECK(message(model, 1).find("memory of module 1 (a)") == 0);
  model[1].activations = 0;
  model[1].compute = std::numeric_limits<double>::infinity();
  CHECK(message(model, 1).find("compute of module 1 (a)") == 0);
}

// -- algorithm 2: segments ----------------------------------------------------

TEST_CASE("there are as many segments as devices or children, none empty",
          "[partition][paper][A7]") {
  CHECK(ends_of({1, 1, 1, 1}, 4) == std::vector<size_t>{1, 2, 3, 4});
  CHECK(ends_of({0, 0, 0, 9}, 3) == std::vector<size_t>{1, 2, 4});
  CHECK(ends_of({9, 0, 0, 0}, 3) == std::vector<size_t>{1, 2, 4});
  CHECK(ends_of({0, 0}, 2) == std::vector<size_t>{1, 2});
  // Two children, four devices: two segments, not four.
  auto plan = plan_of(make_model({{"", {1, 2}}, {"a", {}, 1}, {"b", {}, 1}}),
                      4);
  CHECK(plan.module_device == devices{0, 1, 0});
}

TEST_CASE("the smallest of equally good split points is taken",
          "[partition][paper][A8]") {
  CHECK(ends_of({1, 1, 1}, 2) == std::vector<size_t>{1, 3});
  CHECK(ends_of({2, 1, 1, 1, 3}, 3) == std::vector<size_t>{1, 4, 5});
}

TEST_CASE("the fast split equals the printed recursion, ties included",
          "[partition][paper][A8]") {
  std::mt19937_64 engine{11};
  for (int round = 0; round < 3000; ++round) {
    auto n = 1 + engine() % 12;
    auto parts = 1 + engine() % n;
    auto largest = engine() % 2 == 0 ? 3u : 50u;
    std::vector<exact_cost> costs;
    for (size_t i = 0; i < n; ++i)
      costs.push_back(engine() % (largest + 1));
    auto sum = [&](size_t i, size_t j) {
      exact_cost result = 0;
      for (; i < j; ++i)
        result += costs[i];
      return result;
    };
    std::vector<std::vector<exact_cost>> c(parts + 1,
                                           std::vector<exact_cost>(n + 1));
    std::vector<std::vector<size_t>> at(parts + 1, std::vector<size_t>(n + 1));
    for (size_t k = 1; k <= parts; ++k)
      for (size_t i = k; i <= n; ++i)
        for (size_t j = k - 1; j < (k == 1 ? 1 : i); ++j) {
          auto value = std::max(k == 1 ? 0 : c[k - 1][j], sum(j, i));
          if (j == k - 1 || value < c[k][i]) {
            c[k][i] = value;
            at[k][i] = j;
          }
        }
    std::vector<size_t> expected(parts);
    auto i = n;
    for (auto k = parts; k > 0; --k) {
      expected[k - 1] = i;
      i = at[k][i];
    }
    REQUIRE(ends_of(costs, parts) == expected);
  }
}

// -- algorithm 3: D'Hondt -----------------------------------------------------

TEST_CASE("each segment has its own divisor", "[partition][paper][A9]") {
  // With one counter for all segments, as printed, it would be 3 to 2.
  auto xs = allot(devices{0, 1, 2, 3, 4}, std::vector<exact_cost>{10, 4});
  CHECK(xs == std::vector<devices>{{0, 1, 3, 4}, {2}});
}

TEST_CASE("devices are allotted from the highest, ties to the first segment",
          "[partition][paper][A10]") {
  auto xs = allot(devices{2, 5, 7}, std::vector<exact_cost>{1, 1, 1});
  CHECK(xs == std::vector<devices>{{7}, {5}, {2}});
}

// -- algorithms 1 to 3 --------------------------------------------------------

TEST_CASE("a segment without a device goes to the first device of its set",
          "[partition][paper][A11]") {
  auto plan = plan_of(make_model({{"", {1, 2}},
                                  {"a", {3, 4}},
                                  {"b", {}, 1},
                                  {"c", {}, 50},
                                  {"d", {}, 50}}),
                      2);
  CHECK(plan.module_device == devices{0, 0, 0, 1, 0});
}

TEST_CASE("a leaf with several devices runs on the first, the rest is idle",
          "[partition][paper][A12]") {
  auto plan = plan_of(make_model({{"", {1, 2}}, {"a", {}, 9}, {"b", {}, 1}}),
                      3);
  CHECK(plan.module_device == devices{0, 0, 0});
  CHECK(plan.loads == std::vector<double>{1, 0, 0});
  REQUIRE(plan.warnings.size() == 1);
  CHECK(plan.warnings[0].find("devices 1 and 2 stay idle: the share of a")
        == 0);
}

TEST_CASE("a node's own cost does not count while its devices are shared",
          "[partition][paper][A13]") {
  auto plan = plan_of(make_model({{"", {1, 2}, 3}, {"a", {}, 1}, {"b", {}, 1}}),
                      2);
  CHECK(plan.module_device == devices{0, 1, 0});
  CHECK(plan.loads[0] == 0.8);
}

TEST_CASE("in a model without costs the first segment gets all devices",
          "[partition][paper][A14]") {
  auto plan = plan_of(
    make_model({{"", {1, 2}}, {"a", {3, 4}}, {"b", {}}, {"c", {}}, {"d", {}}}),
    3);
  CHECK(plan.module_device == devices{0, 0, 0, 0, 0});
  CHECK(plan.score.max_load == 0);
}

TEST_CASE("the decision equals the naive recursion on small trees",
          "[partition][paper]") {
  std::mt19937_64 engine{5};
  for (int round = 0; round < 2000; ++round) {
    auto largest = engine() % 2 == 0 ? 2u : 40u;
    auto model = random_model(engine, 1 + engine() % 14, largest);
    auto num_devices = static_cast<uint32_t>(1 + engine() % 8);
    auto tenths = static_cast<int64_t>(engine() % 11);
    module_tree tree{model};
    // Own cost times sum(memory) x sum(compute) x 10.
    int64_t memory = 0;
    int64_t compute = 0;
    for (auto& x : model) {
      memory += static_cast<int64_t>(x.activations);
      compute += static_cast<int64_t>(*x.compute);
    }
    std::vector<int64_t> own;
    for (auto& node : tree.nodes()) {
      auto& x = model[node.modules[0].value];
      auto m = static_cast<int64_t>(x.activations);
      auto c = static_cast<int64_t>(*x.compute);
      own.push_back(tenths * m * std::max<int64_t>(compute, 1)
                    + (10 - tenths) * c * std::max<int64_t>(memory, 1));
    }
    auto plan = plan_of(model, num_devices, static_cast<double>(tenths) / 10);
    REQUIRE(plan.node_device == naive_partition(tree, own, num_devices).device);
  }
}

// -- the figures of the paper -------------------------------------------------

TEST_CASE("T5-11B by memory gives four devices to each stack",
          "[partition][paper][T5]") {
  auto model = load_t5();
  auto plan = plan_of(model, 8, 1.0);
  CHECK(layers(model, plan, "encoder")
        == runs({{6, 6}, {4, 6}, {2, 6}, {0, 6}}));
  CHECK(layers(model, plan, "decoder")
        == runs({{7, 6}, {5, 6}, {3, 6}, {1, 6}}));
  auto [least, most] = std::minmax_element(plan.loads.begin(),
                                           plan.loads.end());
  CHECK(three_digits(*least) == 0.114);
  CHECK(three_digits(*most) == 0.134);
  CHECK(plan.score.max_load == *most);
}

TEST_CASE(
  "T5-11B by compute gives three devices to the encoder, five to the "
  "decoder",
  "[partition][paper][T5]") {
  auto model = load_t5();
  auto plan = plan_of(model, 8, 0.2);
  CHECK(layers(model, plan, "encoder") == runs({{6, 8}, {3, 8}, {1, 8}}));
  CHECK(layers(model, plan, "decoder")
        == runs({{0, 4}, {7, 5}, {5, 5}, {4, 5}, {2, 5}}));
  auto [least, most] = std::minmax_element(plan.loads.begin(),
                                           plan.loads.end());
  CHECK(three_digits(*least) == 0.107);
  CHECK(three_digits(*most) == 0.131);
  // Embeddings and lm_head share a weight: one node, on device 0.
  for (size_t i = 0; i < model.size(); ++i)
    if (model[i].path == "lm_head" || model[i].path == "shared")
      CHECK(plan.module_device[i] == 0);
}

// -- size ---------------------------------------------------------------------

TEST_CASE("20,000 nodes on 64 devices take no time in any shape",
          "[partition][paper]") {
  constexpr uint64_t n = 20'000;
  std::mt19937_64 engine{3};
  auto shape = GENERATE(as<std::string>{}, "flat", "chain", "caterpillar",
                        "random", "dwindling");
  model_info model(n);
  for (uint64_t i = 0; i < n; ++i) {
    model[i].activations = static_cast<double>(1 + engine() % 1000);
    model[i].compute = static_cast<double>(1 + engine() % 1000);
    uint64_t parent = 0;
    if (shape == "chain")
      parent = i - 1;
    else if (shape == "caterpillar")
      parent = (i - 1) / 64 * 64;
    else if (shape == "random")
      parent = i == 0 ? 0 : engine() % i;
    else if (shape == "dwindling")
      model[i].activations = i + 1 < n ? 0 : 1e9;
    if (i > 0)
      model[parent].children.push_back(module_id{i});
  }
  auto begin = cpu_seconds();
  auto plan = plan_of(model, shape == "dwindling" ? 2 : 64, 0.5);
  CHECK(cpu_seconds() - begin < 2 * slow_build);
  if (shape == "flat")
    CHECK(plan.score.max_load < 1.02 / 64);
}
