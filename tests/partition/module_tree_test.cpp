#include "tests/support/catch.hpp"

#include "partition/module_tree.hpp"
#include "tests/support/error_of.hpp"
#include "tests/support/partition_models.hpp"

#include "transport/error.hpp"

#include <set>

using namespace smp;
using namespace smp::test;

namespace {

/// "root(a(b) c+d)": children in parentheses, modules of one node with "+".
std::string describe(const model_info& model, const module_tree& tree,
                     size_t i = 0) {
  std::string result;
  for (auto x : tree[i].modules) {
    auto& path = model[x.value].path;
    result += (result.empty() ? "" : "+") + (path.empty() ? "root" : path);
  }
  if (tree[i].children.empty())
    return result;
  result += "(";
  for (auto child : tree[i].children)
    result += (result.back() == '(' ? "" : " ") + describe(model, tree, child);
  return result + ")";
}

std::string describe(const model_info& model) {
  return describe(model, module_tree{model});
}

} // namespace

TEST_CASE("modules that share nothing become nodes in preorder",
          "[partition][module_tree]") {
  auto model = make_model(
    {{"", {1, 4}}, {"a", {2, 3}}, {"a.b", {}}, {"a.c", {}}, {"d", {}}});
  module_tree tree{model};
  CHECK(describe(model, tree) == "root(a(a.b a.c) d)");
  CHECK(tree[1].subtree_end == 4);
  CHECK(tree[0].subtree_end == 5);
  CHECK(tree[3].parent == 1);
  CHECK(tree[0].parent == 0);
  CHECK(tree.merges().empty());
  for (size_t i = 0; i < 5; ++i)
    CHECK(tree[tree.node_of(module_id{i})].modules
          == std::vector{module_id{i}});
}

TEST_CASE("children stand in execution order, not in the order of their ids",
          "[partition][module_tree]") {
  CHECK(describe(make_model({{"", {2, 1}}, {"a", {}}, {"b", {}}}))
        == "root(b a)");
}

TEST_CASE("modules that share a parameter are one node",
          "[partition][module_tree]") {
  auto model = make_model({{"", {1, 2, 3}},
                           {"embed", {}, 0, 0, {"w"}},
                           {"body", {}},
                           {"head", {}, 0, 0, {"w", "bias"}}});
  model[1].parameters[0].elements = 100;
  model[3].parameters[0].elements = 100;
  model[3].parameters[1].elements = 7;
  module_tree tree{model};
  CHECK(describe(model, tree) == "root(embed+head body)");
  CHECK(tree[1].parameters == 107);
  REQUIRE(tree.merges().size() == 1);
  auto& why = tree.merges()[0];
  CHECK(why.what == merge_reason::kind::shared_parameter);
  CHECK(why.module == module_id{3});
  CHECK(why.with == module_id{1});
  CHECK(why.text == "w");
}

TEST_CASE("sharing is transitive over different parameters",
          "[partition][module_tree]") {
  auto model = make_model({{"", {1, 2, 3}},
                           {"a", {}, 0, 0, {"v"}},
                           {"b", {}, 0, 0, {"v", "w"}},
                           {"c", {}, 0, 0, {"w"}}});
  CHECK(describe(model) == "root(a+b+c)");
}

TEST_CASE("modules that share a buffer are one node",
          "[partition][module_tree][R18]") {
  auto model = make_model({{"", {1, 2, 3}}, {"a", {}}, {"b", {}}, {"c", {}}});
  model[1].buffers.push_back({9, "mean", 4});
  model[3].buffers.push_back({9, "mean", 4});
  // The ids of parameters and buffers do not mix.
  model[2].parameters.push_back({9, "weight", 4});
  module_tree tree{model};
  CHECK(describe(model, tree) == "root(a+c b)");
  CHECK(tree.merges().at(0).what == merge_reason::kind::shared_buffer);
  CHECK(tree.merges().at(0).text == "mean");
}

TEST_CASE("a module that cannot be intercepted stays with its parent",
          "[partition][module_tree][R20]") {
  auto model = make_model(
    {{"", {1}}, {"a", {2, 4}}, {"a.b", {3}}, {"a.b.c", {}}, {"a.d", {}}});
  model[2].not_interceptable = "write smp::submodule";
  module_tree tree{model};
  CHECK(describe(model, tree) == "root(a+a.b(a.b.c a.d))");
  auto& why = tree.merges().at(0);
  CHECK(why.what == merge_reason::kind::not_interceptable);
  CHECK(why.module == module_id{2});
  CHECK(why.with == module_id{1});
  CHECK(why.text == "write smp::submodule");
}

TEST_CASE("a module that cannot be intercepted joins all of its parents",
          "[partition][module_tree][R20]") {
  auto model = make_model({{"", {1, 2}}, {"a", {3}}, {"b", {3}}, {"c", {}}});
  model[3].not_interceptable = "plain member";
  CHECK(describe(model) == "root(a+c+b)");
}

TEST_CASE("a module whose calls carry what cannot be sent joins its callers",
          "[partition][module_tree][R20]") {
  auto model = make_model({{"", {1, 2}}, {"a", {}}, {"b", {3}}, {"c", {}}});
  model[1].stays_with[module_id{0}] = "argument 0: an Odd cannot be sent";
  model[3].stays_with[module_id{1}] = "result: an Odd cannot be sent";
  module_tree tree{model};
  CHECK(describe(model, tree) == "root+a+c(b)");
  auto& why = tree.merges().at(1);
  CHECK(why.what == merge_reason::kind::unsendable);
  CHECK(why.module == module_id{3});
  CHECK(why.with == module_id{1});
  CHECK(why.text == "result: an Odd cannot be sent");
}

TEST_CASE("the shallowest parent wins, then the first in execution order",
          "[partition][module_tree][A5]") {
  SECTION("shallowest, although a deeper one comes first in preorder") {
    CHECK(describe(make_model(
            {{"", {1, 3}}, {"a", {2}}, {"b", {4}}, {"c", {4}}, {"x", {}}}))
          == "root(a(b) c(x))");
  }
  SECTION("first in execution order among equals") {
    CHECK(
      describe(make_model({{"", {2, 1}}, {"a", {3}}, {"b", {3}}, {"x", {}}}))
      == "root(b(x) a)");
  }
  SECTION("of a merged node") {
    // x and y share w, so their node has parents a.b and c: c is shallower.
    CHECK(describe(make_model({{"", {1, 4}},
                               {"a", {2}},
                               {"a.b", {3}},
                               {"x", {}, 0, 0, {"w"}},
                               {"c", {5}},
                               {"y", {}, 0, 0, {"w"}}}))
          == "root(a(a.b) c(x+y))");
  }
}

TEST_CASE("pruning breaks cycles", "[partition][module_tree][A5]") {
  // a and b.c share w, and so b is child and parent of their node.
  auto model = make_model({{"", {1}},
                           {"a", {2}, 0, 0, {"w"}},
                           {"b", {3}},
                           {"c", {4, 1}, 0, 0, {"w"}},
                           {"d", {}}});
  CHECK(describe(model) == "root(a+c(b d))");
}

TEST_CASE("a merged node stands where its first module stands",
          "[partition][module_tree][A6]") {
  auto model = make_model({{"", {1, 2, 4}},
                           {"a", {}},
                           {"b", {3}},
                           {"b.shared", {}, 0, 0, {"w"}},
                           {"c", {5}},
                           {"c.x", {}}});
  SECTION("the earlier one is deeper") {
    // c takes the place of b.shared, before any later sibling, after b.
    model[4].parameters = model[3].parameters;
    CHECK(describe(model) == "root(a b b.shared+c(c.x))");
  }
  SECTION("the earlier one is a sibling") {
    model[1].parameters = model[3].parameters;
    CHECK(describe(model) == "root(a+b.shared b c(c.x))");
  }
}

TEST_CASE("modules that share with the root are part of the root",
          "[partition][module_tree]") {
  auto model = make_model({{"", {1}, 0, 0, {"w"}},
                           {"a", {2}},
                           {"a.b", {3}, 0, 0, {"w"}},
                           {"a.b.c", {}}});
  CHECK(describe(model) == "root+a.b(a a.b.c)");
}

TEST_CASE("one parameter listed twice by one module is not shared",
          "[partition][module_tree]") {
  auto model = make_model({{"", {1}}, {"a", {}, 0, 0, {"w", "w"}}});
  model[1].parameters[0].elements = model[1].parameters[1].elements = 5;
  module_tree tree{model};
  CHECK(tree.merges().empty());
  CHECK(tree[1].parameters == 5);
}

TEST_CASE("a model that is not a model is one clear error",
          "[partition][module_tree]") {
  auto message = [](const model_info& x) {
    return cause_of([&x] { module_tree{x}; }, error_code::config);
  };
  CHECK(message({}) == "there is no module to partition");
  CHECK(message(make_model({{"", {1}}, {"a", {7}}}))
        == "module a has child 7, but there are only 2 modules");
  CHECK(message(make_model({{"", {1}}, {"a", {}}, {"b", {}}}))
        == "module b is not reached from the root");
}

TEST_CASE("every module is in exactly one node, and subtrees are ranges",
          "[partition][module_tree]") {
  std::mt19937_64 engine{7};
  for (int round = 0; round < 200; ++round) {
    auto model = random_model(engine, 1 + engine() % 30, 9);
    for (auto& x : model) { // some sharing, some extra parents
      if (engine() % 3 == 0)
        x.parameters.push_back({engine() % 10, "w", 3});
      if (engine() % 5 == 0)
        x.children.push_back(module_id{engine() % model.size()});
    }
    module_tree tree{model};
    std::multiset<module_id> seen;
    for (size_t i = 0; i < tree.size(); ++i) {
      auto& node = tree[i];
      REQUIRE_FALSE(node.modules.empty());
      seen.insert(node.modules.begin(), node.modules.end());
      auto next = i + 1;
      for (auto child : node.children) {
        REQUIRE(child == next);
        REQUIRE(tree[child].parent == i);
        next = tree[child].subtree_end;
      }
      REQUIRE(node.subtree_end == next);
    }
    REQUIRE(tree[0].subtree_end == tree.size());
    REQUIRE(tree[0].modules[0] == module_id{0});
    REQUIRE(seen.size() == model.size());
    REQUIRE(std::set<module_id>(seen.begin(), seen.end()).size()
            == model.size());
  }
}

TEST_CASE("a chain of 20,000 modules needs no stack",
          "[partition][module_tree]") {
  model_info model(20'000);
  for (uint64_t i = 0; i + 1 < model.size(); ++i)
    model[i].children.push_back(module_id{i + 1});
  module_tree tree{model};
  CHECK(tree.size() == 20'000);
  CHECK(tree[19'999].parent == 19'998);
}
