// ctest: seconds=11

#include "tests/support/catch.hpp"

#include "runtime/placement/partition_json.hpp"
#include "tests/support/cpu_time.hpp"
#include "tests/support/naive_partition.hpp"
#include "tests/support/runs/program.hpp"
#include "tests/support/scratch_dir.hpp"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <map>
#include <random>
#include <set>

using Catch::Matchers::ContainsSubstring;
using namespace smp;
using namespace smp::test;

using nlohmann::json;

namespace fs = std::filesystem;

namespace {

json node(const std::string& name, double memory, double compute,
          std::vector<int> children, std::vector<std::string> params = {}) {
  return {{"name", name},
          {"memory", memory},
          {"compute", compute},
          {"children", children},
          {"params", params}};
}

/// A root with two parts.
json small_tree() {
  return {{"nodes",
           {node("root", 5, 5, {1, 2}, {"w"}), node("a", 3, 1, {}),
            node("b", 2, 4, {}, {"v"})}}};
}

json random_tree(std::mt19937_64& engine, int size) {
  auto draw = [&engine](int n) {
    return static_cast<int>(engine() % static_cast<uint64_t>(n));
  };
  auto largest = draw(2) == 0 ? 3 : 40;
  auto nodes = json::array();
  for (int i = 0; i < size; ++i) {
    nodes.push_back(
      node("n" + std::to_string(i), draw(largest + 1), draw(largest + 1), {}));
    if (draw(4) == 0)
      nodes.back()["params"].push_back("p" + std::to_string(draw(4)));
    if (i > 0)
      nodes[draw(i)]["children"].push_back(i);
  }
  return {{"nodes", nodes}};
}

// -- appendix C once more, from the JSON on -----------------------------------

/// The tree of module nodes, made without partition/.
struct naive_tree {
  struct entry {
    std::vector<size_t> children;
    std::vector<size_t> modules;
  };

  explicit naive_tree(const json& nodes) {
    auto n = nodes.size();
    std::vector<size_t> position(n);
    size_t next = 0;
    number(nodes, 0, position, next);
    // Modules that share a parameter, again and again until nothing changes.
    std::vector<size_t> group(n);
    for (size_t i = 0; i < n; ++i)
      group[i] = i;
    for (auto changed = true; changed;) {
      changed = false;
      for (size_t i = 0; i < n; ++i)
        for (size_t j = 0; j < n; ++j)
          for (auto& p : nodes[i]["params"])
            for (auto& q : nodes[j]["params"])
              if (p == q && group[i] != group[j]) {
                group[i] = group[j] = std::min(group[i], group[j]);
                changed = true;
              }
    }
    std::map<size_t, size_t> first; // group -> earliest position
    for (size_t i = 0; i < n; ++i) {
      auto [at, added] = first.emplace(group[i], position[i]);
      at->second = std::min(at->second, position[i]);
    }
    std::map<size_t, size_t> index; // group -> index in `nodes_`
    std::vector<size_t> queue{group[0]};
    index[group[0]] = 0;
    nodes_.emplace_back();
    for (size_t k = 0; k < queue.size(); ++k) {
      std::vector<std::pair<size_t, size_t>> below; // position, group
      for (size_t i = 0; i < n; ++i)
        if (group[i] == queue[k]) {
          nodes_[k].modules.push_back(i);
          for (size_t child : nodes[i]["children"])
            if (!index.contains(group[child]))
              below.emplace_back(first[group[child]], group[child]);
        }
      std::sort(below.begin(), below.end());
      for (auto& [at, g] : below)
        if (index.emplace(g, nodes_.size()).second) {
          nodes_[k].children.push_back(nodes_.size());
          nodes_.emplace_back();
          queue.push_back(g);
        }
    }
  }

  static void number(const json& nodes, size_t i, std::vector<size_t>& position,
                     size_t& next) {
    position[i] = next++;
    for (size_t child : nodes[i]["children"])
      number(nodes, child, position, next);
  }

  size_t size() const {
    return nodes_.size();
  }

  const entry& operator[](size_t i) const {
    return nodes_[i];
  }

  std::vector<entry> nodes_;
};

/// @param alpha in percent
std::vector<uint32_t> naive_decision(const json& nodes, uint32_t devices,
                                     int64_t alpha) {
  naive_tree tree{nodes};
  int64_t memory = 0;
  int64_t compute = 0;
  for (auto& x : nodes) {
    memory += x["memory"].get<int64_t>();
    compute += x["compute"].get<int64_t>();
  }
  memory = std::max<int64_t>(memory, 1);
  compute = std::max<int64_t>(compute, 1);
  std::vector<int64_t> own(tree.size());
  for (size_t i = 0; i < tree.size(); ++i)
    for (auto m : tree[i].modules)
      own[i] += alpha * nodes[m]["memory"].get<int64_t>() * compute
                + (100 - alpha) * nodes[m]["compute"].get<int64_t>() * memory;
  naive_partition naive{tree, own, devices};
  std::vector<uint32_t> result(nodes.size());
  for (size_t i = 0; i < tree.size(); ++i)
    for (auto m : tree[i].modules)
      result[m] = naive.device[i];
  return result;
}

json decide(const json& tree, uint32_t devices, double alpha,
            const char* strategy) {
  auto x = parse_partition_tree(tree.dump(), "tree.json");
  partition_options options;
  options.manual.devices = devices;
  options.memory_weight = alpha;
  options.strategy = parse_partition_strategy(strategy);
  options.crossing = x.crossing();
  return json::parse(decision_json(make_partition(x.model, options)));
}

/// smp-train partition --tree, in a directory of its own.
struct tree_run : scratch_dir {
  /// @returns the exit code
  int run(const std::string& tree, std::vector<std::string> arguments) {
    write("tree.json", tree);
    arguments.insert(arguments.begin(), {built_program("smp-train"),
                                         "partition", "--tree", "tree.json"});
    program p{std::move(arguments), path};
    auto code = p.join();
    output = p.output();
    return code;
  }

  json out() const {
    return json::parse(content_of(path / "out.json"));
  }

  /// Files that are there.
  std::set<std::string> files() const {
    std::set<std::string> result;
    for (auto& x : fs::directory_iterator{path})
      result.insert(x.path().filename());
    return result;
  }

  std::string output;
};

} // namespace

// -- decisions ----------------------------------------------------------------

TEST_CASE("A tree given as data is partitioned as appendix C says",
          "[apps][partition]") {
  std::mt19937_64 engine{5};
  for (int round = 0; round < 1500; ++round) {
    auto tree = random_tree(engine, 1 + static_cast<int>(engine() % 14));
    auto devices = 1 + static_cast<uint32_t>(engine() % 6);
    auto alpha = static_cast<int64_t>(engine() % 11) * 10;
    INFO("round " << round << ", " << devices << " devices, alpha " << alpha
                  << " %: " << tree.dump());
    auto out = decide(tree, devices, static_cast<double>(alpha) / 100, "paper");
    REQUIRE(out["device"].get<std::vector<uint32_t>>()
            == naive_decision(tree["nodes"], devices, alpha));
  }
}

TEST_CASE("Loads are shares of the cost, and requests are edges that cross",
          "[apps][partition]") {
  auto out = decide(small_tree(), 2, 0.5, "balanced");
  CHECK(out["device"] == json({0, 1, 1}));
  CHECK(out["loads"] == json({0.5, 0.5}));
  CHECK(out["max_cost"] == 0.5);
  CHECK(out["cut_requests"] == 2);
  CHECK(out["cut_bytes"] == 0);
  CHECK(out["predicted"] == 0.5);
}

TEST_CASE("Bytes and times give transfers a price", "[apps][partition]") {
  auto tree = small_tree();
  tree["nodes"][1]["bytes"] = 1000;
  tree["nodes"][2]["bytes"] = 500'000'000;
  tree["step_seconds"] = 0.1;
  auto out = decide(tree, 2, 0.5, "balanced");
  // b costs 0.3 of the step and would take 2 x 0.1 s there and back.
  CHECK(out["device"] == json({0, 1, 0}));
  CHECK(out["cut_bytes"] == 1000);
  auto expected = 0.8 + 2 * (200e-6 + 1000 / 5e9) / 0.1;
  CHECK(out["predicted"].get<double>() == Catch::Approx(expected));
  // Without a time of the step, compute is the forward time in seconds.
  tree.erase("step_seconds");
  out = decide(tree, 2, 0.5, "balanced");
  expected = 0.5 + 2 * (2 * 200e-6 + 500'001'000 / 5e9) / 30;
  CHECK(out["predicted"].get<double>() == Catch::Approx(expected));
}

// -- the command --------------------------------------------------------------

TEST_CASE_METHOD(tree_run,
                 "The command shows the T5-11B of the paper's figures",
                 "[apps][partition][T5]") {
  auto t5 = content_of(source_file("tests/data/t5_11b_tree.json"));
  auto nodes = json::parse(t5)["nodes"];
  auto layers = [&](const std::string& stack) {
    std::vector<int> result;
    auto devices = out()["device"];
    for (int i = 0; i < 24; ++i)
      for (size_t k = 0; k < nodes.size(); ++k)
        if (nodes[k]["name"] == stack + ".block." + std::to_string(i))
          result.push_back(devices[k]);
    return result;
  };
  auto runs = [](std::vector<std::pair<int, int>> xs) {
    std::vector<int> result;
    for (auto& [device, times] : xs)
      result.insert(result.end(), times, device);
    return result;
  };
  auto check_loads = [&](double least, double most) {
    auto loads = out()["loads"].get<std::vector<double>>();
    REQUIRE(loads.size() == 8);
    auto rounded = [](double x) { return std::round(x * 1000) / 1000; };
    CHECK(rounded(*std::min_element(loads.begin(), loads.end())) == least);
    CHECK(rounded(*std::max_element(loads.begin(), loads.end())) == most);
    CHECK(out()["max_cost"] == *std::max_element(loads.begin(), loads.end()));
  };
  REQUIRE(run(t5, {"--devices", "8", "--memory-weight", "1.0", "--strategy",
                   "paper", "--json", "out.json"})
          == 0);
  CHECK(layers("encoder") == runs({{6, 6}, {4, 6}, {2, 6}, {0, 6}}));
  CHECK(layers("decoder") == runs({{7, 6}, {5, 6}, {3, 6}, {1, 6}}));
  check_loads(0.114, 0.134);
  REQUIRE(run(t5, {"--devices", "8", "--memory-weight", "0.2", "--strategy",
                   "paper", "--json", "out.json"})
          == 0);
  CHECK(layers("encoder") == runs({{6, 8}, {3, 8}, {1, 8}}));
  CHECK(layers("decoder") == runs({{0, 4}, {7, 5}, {5, 5}, {4, 5}, {2, 5}}));
  check_loads(0.107, 0.131);
}

namespace {

struct bad_tree {
  std::string tree;
  std::vector<const char*> texts;
};

std::vector<bad_tree> bad_trees() {
  auto changed = [](const char* pointer, json value) {
    auto x = small_tree();
    x[json::json_pointer{pointer}] = std::move(value);
    return x.dump();
  };
  auto without = [](size_t i, const char* field) {
    auto x = small_tree();
    x["nodes"][i].erase(field);
    return x.dump();
  };
  auto coloured = small_tree();
  coloured["nodes"][1]["name"] = "a\x1b[31m";
  coloured["nodes"][1]["memory"] = -3;
  return {
    {"", {"not valid JSON"}},
    {"{\"nodes\": [", {"not valid JSON", "line 1"}},
    {"[]", {"\"nodes\""}},
    {"{}", {"\"nodes\"", "missing"}},
    {"{\"nodes\": []}", {"\"nodes\""}},
    {"{\"nodes\": [7]}", {"node 0", "is 7"}},
    {changed("/nodes/2", nullptr), {"node 2", "is null"}},
    {without(1, "name"), {"node 1", "\"name\"", "missing"}},
    {without(1, "memory"), {"node 1 (\"a\")", "\"memory\"", "missing"}},
    {without(2, "compute"), {"node 2 (\"b\")", "\"compute\"", "missing"}},
    {without(2, "children"), {"node 2", "\"children\"", "missing"}},
    {changed("/nodes/1/memory", -1), {"node 1", "\"memory\"", "is -1"}},
    {changed("/nodes/1/compute", -0.5), {"node 1", "\"compute\"", "-0.5"}},
    {changed("/nodes/1/compute", "2"), {"\"compute\"", "is a string"}},
    {changed("/nodes/1/bytes", -8), {"node 1", "\"bytes\"", "is -8"}},
    {changed("/nodes/1/params", "w"), {"\"params\"", "is a string"}},
    {changed("/nodes/1/params", {3}), {"\"params\"", "is 3"}},
    {changed("/nodes/1/children", {9}), {"node 1", "node 9", "only 3"}},
    {changed("/nodes/1/children", {-1}), {"node 1", "node -1"}},
    {changed("/nodes/1/children", {1.5}), {"\"children\"", "is 1.5"}},
    {changed("/nodes/1/children", {0}), {"node 1", "root", "cycle"}},
    {changed("/nodes/1/children", {1}), {"node 1", "itself", "cycle"}},
    {changed("/nodes/1/children", {2}),
     {"node 1", "node 2 (\"b\")", "node 0", "one parent"}},
    {changed("/nodes/0/children", {1, 2, 1}), {"node 1", "twice"}},
    {changed("/nodes/0/children", {1}), {"node 2 (\"b\")", "no parent"}},
    {json{
       {"nodes",
        {node("root", 1, 1, {}), node("a", 1, 1, {2}), node("b", 1, 1, {1})}}}
       .dump(),
     {"node 1 (\"a\")", "\"children\"", "cycle"}},
    {coloured.dump(), {"node 1 (\"a\\u001b[31m\")"}},
    {changed("/step_seconds", 0), {"\"step_seconds\"", "is 0"}},
  };
}

} // namespace

TEST_CASE_METHOD(tree_run, "A bad tree is one line that names node and field",
                 "[apps][partition]") {
  for (auto& [tree, texts] : bad_trees()) {
    INFO(tree);
    CHECK(run(tree, {"--devices", "2", "--json", "out.json"}) == 2);
    CHECK_THAT(output, ContainsSubstring("tree.json: "));
    for (auto text : texts)
      CHECK_THAT(output, ContainsSubstring(text));
    CHECK(std::count(output.begin(), output.end(), '\n') == 1);
    CHECK(files() == std::set<std::string>{"tree.json"});
  }
}

TEST_CASE_METHOD(tree_run, "What goes wrong leaves the old decision as it was",
                 "[apps][partition]") {
  write("out.json", "old");
  CHECK(run("{", {"--devices", "2", "--json", "out.json"}) == 2);
  CHECK(content_of(path / "out.json") == "old");
  CHECK(
    run(small_tree().dump(), {"--devices", "2", "--json", "nowhere/out.json"})
    == 2);
  CHECK_THAT(output, ContainsSubstring("nowhere/out.json"));
  CHECK(run(small_tree().dump(), {"--devices", "2", "--json", "out.json"})
        == 0);
  CHECK(out()["device"].size() == 3);
  CHECK(files() == std::set<std::string>{"out.json", "tree.json"});
  // A pipe is not a file to be replaced.
  CHECK(run(small_tree().dump(), {"--devices", "2", "--json", "/dev/stdout"})
        == 0);
  CHECK_THAT(output, ContainsSubstring("\"max_cost\":"));
}

TEST_CASE_METHOD(tree_run, "Options that do not go together are refused",
                 "[apps][partition]") {
  for (auto& [arguments, text] :
       std::vector<std::pair<std::vector<std::string>, const char*>>{
         {{}, "--devices"},
         {{"--devices", "0"}, "--devices"},
         {{"--devices", "2", "--memory-weight", "1.5"}, "--memory-weight"},
         {{"--devices", "2", "--strategy", "best"}, "--strategy"},
         {{"--devices", "2", "some.toml"}, "some.toml"},
         {{"--devices", "2", "--model.width=3"}, "--model.width=3"}}) {
    INFO(text);
    CHECK(run(small_tree().dump(), arguments) == 2);
    CHECK_THAT(output, ContainsSubstring(text));
  }
}

TEST_CASE_METHOD(tree_run, "20,000 nodes on 64 devices take under two seconds",
                 "[apps][partition]") {
  std::mt19937_64 engine{3};
  auto flat = GENERATE(true, false);
  auto strategy = GENERATE("paper", "balanced");
  auto nodes = json::array();
  for (int i = 0; i < 20'000; ++i) {
    nodes.push_back(node("n" + std::to_string(i),
                         static_cast<double>(engine() % 1000),
                         static_cast<double>(engine() % 1000), {},
                         {"p" + std::to_string(i % 19'000)}));
    if (i > 0)
      nodes[flat ? 0 : engine() % static_cast<uint64_t>(i)]["children"]
        .push_back(i);
  }
  auto tree = json{{"nodes", nodes}}.dump();
  auto begin = children_cpu_seconds();
  REQUIRE(
    run(tree, {"--devices", "64", "--strategy", strategy, "--json", "out.json"})
    == 0);
  CHECK(out()["device"].size() == 20'000);
  CHECK(out()["loads"].size() == 64);
  INFO(output);
  CHECK(children_cpu_seconds() - begin < 2 * slow_build);
  CHECK(std::count(output.begin(), output.end(), '\n') < 60);
}
