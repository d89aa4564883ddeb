#include "tests/support/catch.hpp"

#include "partition/partitioner.hpp"
#include "partition/search/balanced.hpp"
#include "partition/search/paper.hpp"
#include "tests/support/cpu_time.hpp"
#include "tests/support/partition_models.hpp"
#include "tests/support/t5_tree.hpp"

#include <algorithm>

using namespace smp;
using namespace smp::test;

namespace {

using devices = std::vector<uint32_t>;

partition_plan plan_of(const model_info& model, uint32_t num_devices,
                       communication crossing = {}, double memory_weight = 1) {
  partition_options options;
  options.manual.devices = num_devices;
  options.memory_weight = memory_weight;
  options.crossing = crossing;
  return make_partition(model, options);
}

/// Counts crossing edges and loads without partition/search/problem, and tries
/// every assignment with the root on device 0.
double best_possible(const model_info& model, const partition_plan& plan,
                     double request) {
  auto n = model.size();
  std::vector<size_t> parent(n);
  for (size_t i = 0; i < n; ++i)
    for (auto child : model[i].children)
      parent[child.value] = i;
  std::vector<double> own;
  for (size_t i = 0; i < n; ++i)
    own.push_back(
      plan.costs.share(plan.costs.own(plan.tree.node_of(module_id{i}))));
  double best = std::numeric_limits<double>::infinity();
  devices x(n);
  std::vector<double> loads;
  for (;;) {
    loads.assign(plan.options.manual.devices, 0);
    double value = 0;
    for (size_t i = 0; i < n; ++i) {
      loads[x[i]] += own[i];
      value += i > 0 && x[i] != x[parent[i]] ? request : 0;
    }
    best = std::min(best,
                    value + *std::max_element(loads.begin(), loads.end()));
    size_t i = 1; // the next assignment, as a number counts up
    while (i < n && ++x[i] == plan.options.manual.devices)
      x[i++] = 0;
    if (i >= n)
      return best;
  }
}

/// A tree that falls into one connected part for each device, and what that
/// assignment is worth: it has one request less than devices, below which no
/// assignment to all devices is.
struct planted {
  model_info model;
  double largest = 0; // share of the largest part
};

/// @param uneven by how much parts differ in cost, as a share of it
planted planted_model(std::mt19937_64& engine, uint64_t num_devices,
                      uint64_t part_size, double uneven) {
  planted result;
  auto& model = result.model;
  double total = 0;
  for (uint64_t part = 0; part < num_devices; ++part) {
    auto drawn = 1e-6 * static_cast<double>(engine() % 1'000'000);
    auto cost = static_cast<uint64_t>(100'000 * (1 - uneven * drawn));
    total += static_cast<double>(cost);
    result.largest = std::max(result.largest, static_cast<double>(cost));
    std::vector<uint64_t> cuts{0, cost};
    while (cuts.size() <= part_size)
      cuts.push_back(engine() % cost);
    std::sort(cuts.begin(), cuts.end());
    auto first = model.size();
    for (uint64_t i = 0; i < part_size; ++i) {
      auto id = model.size();
      auto& x = model.emplace_back();
      x.path = id == 0 ? "" : "m" + std::to_string(id);
      x.activations = static_cast<double>(cuts[i + 1] - cuts[i]);
      x.compute = x.activations;
      // Inside of the part, but for the module that it begins with.
      auto parent = i > 0 ? first + engine() % i
                          : engine() % std::max<uint64_t>(id, 1);
      if (id > 0)
        model[parent].children.push_back(module_id{id});
    }
  }
  result.largest /= total;
  return result;
}

/// With k devices the largest load is at least 1 / k, and a tree has at least
/// k - 1 edges between them.
double lower_bound(uint64_t num_devices, double request) {
  auto best = 1.0;
  for (uint64_t k = 2; k <= num_devices; ++k)
    best = std::min(best, 1.0 / static_cast<double>(k)
                            + request * static_cast<double>(k - 1));
  return best;
}

model_info gpt_like(bool sequential) {
  model_info result = make_model({{"", {1, 2, 3, 4}},
                                  {"embed", {}, 0, 0},
                                  {"blocks", {}, 0, 0},
                                  {"norm", {}, 0, 0},
                                  {"head", {}, 0, 0}});
  result[2].container = true;
  result[2].sequential = sequential;
  for (uint64_t i = 0; i < 8; ++i) {
    result[2].children.push_back(module_id{result.size()});
    auto& x = result.emplace_back();
    x.path = "blocks." + std::to_string(i);
    x.activations = 1;
    x.compute = 1;
    x.call_bytes = 1000;
  }
  return result;
}

} // namespace

TEST_CASE("balanced is within 5 % of the best of all assignments",
          "[partition][balanced]") {
  auto request = GENERATE(0.0, 0.003, 0.05);
  std::mt19937_64 engine{17};
  for (int round = 0; round < 120; ++round) {
    auto model = random_model(engine, 5 + engine() % 5, 20);
    auto num_devices = static_cast<uint32_t>(2 + engine() % 3);
    auto plan = plan_of(model, num_devices, {request, 0}, 0.5);
    auto best = best_possible(model, plan, request);
    INFO("round " << round << ", predicted " << plan.score.predicted
                  << ", best " << best);
    REQUIRE(plan.score.predicted >= best - 1e-9);
    REQUIRE(plan.score.predicted <= 1.05 * best + 1e-9);
  }
}

TEST_CASE("balanced is within 5 % of the best of trees of any size",
          "[partition][balanced]") {
  auto num_devices = GENERATE(2u, 3u, 4u, 8u);
  auto part_size = GENERATE(9u, 20u, 60u);
  auto uneven = GENERATE(0.0, 0.1);
  // Of what a request may cost before fewer devices would be better.
  auto share = GENERATE(0.0, 0.1, 0.5);
  auto request = share / (num_devices * (num_devices - 1));
  std::mt19937_64 engine{29};
  for (int round = 0; round < 10; ++round) {
    auto x = planted_model(engine, num_devices, part_size, uneven);
    auto plan = plan_of(x.model, num_devices, {request, 0}, 0.5);
    auto value = x.largest + request * (num_devices - 1);
    INFO(num_devices << " devices, parts of " << part_size << " modules, "
                     << uneven << " uneven, request " << request << ", round "
                     << round << ": predicted " << plan.score.predicted
                     << ", planted " << value);
    CHECK(plan.score.predicted >= lower_bound(num_devices, request) - 1e-9);
    CHECK(plan.score.predicted <= 1.05 * value);
  }
}

TEST_CASE("balanced is never worse than the paper", "[partition][balanced]") {
  std::mt19937_64 engine{23};
  for (int round = 0; round < 500; ++round) {
    auto model = random_model(engine, 1 + engine() % 60, 100);
    auto num_devices = static_cast<uint32_t>(1 + engine() % 9);
    communication crossing;
    if (engine() % 2 == 0)
      crossing = {1e-3 * static_cast<double>(engine() % 50),
                  1e-6 * static_cast<double>(engine() % 50)};
    for (auto& x : model) {
      x.call_bytes = engine() % 1000;
      x.sequential = engine() % 3 == 0;
      x.container = engine() % 3 == 0;
      if (engine() % 10 == 0)
        x.pinned_device = static_cast<uint32_t>(engine() % num_devices);
    }
    model[0].pinned_device.reset();
    auto plan = plan_of(model, num_devices, crossing, 0.3);
    REQUIRE(plan.score.predicted <= plan.paper.predicted);
    REQUIRE(plan.node_device[0] == 0);
    for (size_t i = 0; i < model.size(); ++i)
      if (model[i].pinned_device)
        REQUIRE(plan.module_device[i] == *model[i].pinned_device);
  }
}

TEST_CASE("balanced solves what the paper's strategy does badly",
          "[partition][balanced]") {
  SECTION("a chain of single children") {
    auto plan = plan_of(make_model({{"", {1}, 1},
                                    {"a", {2}, 1},
                                    {"b", {3}, 1},
                                    {"c", {4}, 1},
                                    {"d", {}, 1}}),
                        3);
    CHECK(plan.paper.max_load == 1);
    CHECK(plan.score.max_load == Catch::Approx(0.4));
  }
  SECTION("a heavy own cost where the children's devices begin") {
    auto plan = plan_of(
      make_model({{"", {1, 2}, 4}, {"a", {}, 2}, {"b", {}, 2}}), 2);
    CHECK(plan.paper.max_load == Catch::Approx(0.75));
    CHECK(plan.score.max_load == Catch::Approx(0.5));
  }
  SECTION("two equal stacks on three devices") {
    model_info model = make_model({{"", {1, 2}}, {"a", {}}, {"b", {}}});
    for (uint64_t stack : {1, 2})
      for (int i = 0; i < 3; ++i) {
        model[stack].children.push_back(module_id{model.size()});
        model.emplace_back().activations = 1;
      }
    auto plan = plan_of(model, 3);
    CHECK(plan.paper.max_load == Catch::Approx(0.5));
    CHECK(plan.score.max_load == Catch::Approx(1.0 / 3));
  }
  SECTION("T5-11B") {
    for (auto alpha : {1.0, 0.2}) {
      auto plan = plan_of(load_t5(), 8, {}, alpha);
      CHECK(plan.paper.max_load > 0.131);
      CHECK(plan.score.max_load < 0.1285);
    }
  }
}

TEST_CASE("a sequential model is cut once for two devices",
          "[partition][balanced][R8]") {
  auto plan = plan_of(gpt_like(true), 2);
  CHECK(plan.score.max_load == 0.5);
  CHECK(plan.score.requests == 1);
  // One half runs with the container, the other is one range of it.
  auto blocks = devices(plan.module_device.begin() + 5,
                        plan.module_device.end());
  CHECK((std::is_sorted(blocks.begin(), blocks.end())
         || std::is_sorted(blocks.rbegin(), blocks.rend())));
}

TEST_CASE(
  "a run of a sequential module is one request with the bytes of both "
  "ends",
  "[partition][balanced][R8]") {
  auto requests = [](bool sequential) {
    auto model = gpt_like(sequential);
    for (size_t i : {7, 8, 9})
      model[i].pinned_device = 1;
    model[8].call_bytes = 50;
    partition_options options;
    options.manual.devices = 2;
    options.manual.automatic = false;
    auto plan = make_partition(model, options);
    return std::pair{plan.score.requests, plan.score.bytes};
  };
  CHECK(requests(true) == std::pair<uint64_t, uint64_t>{1, 1000});
  CHECK(requests(false) == std::pair<uint64_t, uint64_t>{3, 2050});
}

TEST_CASE("children of a list are called by the module above it",
          "[partition][balanced][R8]") {
  auto model = gpt_like(false);
  model[2].pinned_device = 1; // the list, and with it the blocks
  partition_options options;
  options.manual.devices = 2;
  options.manual.automatic = false;
  CHECK(make_partition(model, options).score.requests == 8);
  model[2].container = false;
  CHECK(make_partition(model, options).score.requests == 1);
}

TEST_CASE("expensive requests keep the model together",
          "[partition][balanced]") {
  auto plan = plan_of(gpt_like(false), 2, {0.2, 0});
  CHECK(plan.score.requests == 0);
  CHECK(plan.score.predicted == 1);
  REQUIRE(plan.warnings.size() == 1);
  CHECK(plan.warnings[0]
        == "device 1 stays idle: nothing that could be moved there would pay");
}

TEST_CASE("crossing is priced relative to a step on one device",
          "[partition][balanced]") {
  // 10 ms a microbatch; 200 us and 5 GB/s, forward and backward.
  auto x = communication::from_times(10e-3);
  CHECK(x.request == Catch::Approx(0.04));
  CHECK(x.byte * 5e6 == Catch::Approx(0.2));
  auto plan = plan_of(gpt_like(true), 2, x);
  CHECK(plan.score.predicted
        == Catch::Approx(plan.score.max_load
                         + 0.04 * static_cast<double>(plan.score.requests)
                         + 0.04e-6 * static_cast<double>(plan.score.bytes)));
}

TEST_CASE("balanced partitions 20,000 nodes on 64 devices in time",
          "[partition][balanced]") {
  constexpr uint64_t n = 20'000;
  std::mt19937_64 engine{3};
  auto shape = GENERATE(as<std::string>{}, "flat", "chain", "random");
  model_info model(n);
  for (uint64_t i = 0; i < n; ++i) {
    model[i].activations = static_cast<double>(1 + engine() % 1000);
    model[i].compute = static_cast<double>(1 + engine() % 1000);
    auto parent = shape == "flat"    ? 0
                  : shape == "chain" ? i - 1
                                     : engine() % std::max<uint64_t>(i, 1);
    if (i > 0)
      model[parent].children.push_back(module_id{i});
  }
  auto begin = cpu_seconds();
  auto plan = plan_of(model, 64, {}, 0.5);
  CHECK(cpu_seconds() - begin < 2 * slow_build);
  CHECK(plan.score.max_load < 1.05 / 64);
}
