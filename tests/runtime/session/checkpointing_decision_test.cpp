#include "tests/support/catch.hpp"

#include "runtime/intercept/submodule.hpp"
#include "runtime/session/checkpointing_decision.hpp"
#include "runtime/session/partitioning.hpp"
#include "tests/support/error_of.hpp"

#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

// Which modules are computed again in backward, and which of them together.

using namespace smp;
using namespace smp::test;

using Catch::Matchers::ContainsSubstring;

namespace {

using torch::nn::Linear;

struct several_impl : torch::nn::Module {
  several_impl() {
    for (int i = 0; i < 2; ++i)
      list->push_back(submodule<Linear>(2, 2));
    register_module("body", body);
    register_module("list", list);
    register_module("seen", seen);
    register_module("hidden", hidden);
  }

  torch::nn::Sequential body{Linear(2, 2), Linear(2, 2), Linear(2, 2),
                             Linear(2, 2), Linear(2, 2)};
  torch::nn::ModuleList list;
  submodule<Linear> seen{2, 2};
  Linear hidden{2, 2};
};
TORCH_MODULE_IMPL(several, several_impl);

struct fixture {
  checkpointing_decision decide(std::vector<std::string> patterns,
                                activation_checkpointing how = {}) {
    return decide_checkpointing(walked, {marked, std::move(patterns), how},
                                stateful);
  }

  std::string refusal(std::vector<std::string> patterns,
                      activation_checkpointing how = {}) {
    return error_of([&] { decide(std::move(patterns), how); });
  }

  const void* identity(const std::string& name) const {
    return walked.modules[walked.find_module(name).value()].identity();
  }

  /// Region of each child of the Sequential, counted from the first one; of
  /// five, of which two are on rank 0.
  std::vector<uint32_t> regions(const std::string& strategy) {
    std::vector<rank_id> owners(walked.modules.size(), rank_id{0});
    auto& children = walked.modules[walked.find_module("body").value()]
                       .children;
    for (size_t k = 2; k < children.size(); ++k)
      owners[children[k]] = rank_id{1};
    auto found = regions_of(walked, decide({"body"}, {strategy}).chosen,
                            owners);
    std::vector<uint32_t> result;
    for (auto child : children)
      result.push_back(found[child].region - found[children[0]].region);
    return result;
  }

  several model;
  walked_model walked = walk_hooked({model.ptr(), {}});
  std::map<const void*, activation_checkpointing> marked;
  std::map<const void*, std::string> stateful;
};

} // namespace

TEST_CASE_METHOD(fixture, "a strategy groups children of a Sequential by rank",
                 "[runtime][R52]") {
  using regions = std::vector<uint32_t>;
  CHECK(this->regions("each") == regions{0, 1, 2, 3, 4});
  CHECK(this->regions("contiguous") == regions{0, 0, 2, 2, 2});
  CHECK(this->regions("group_2") == regions{0, 0, 2, 2, 4});
  CHECK(this->regions("group_3") == regions{0, 0, 2, 2, 2}); // as in the paper
}

TEST_CASE_METHOD(fixture, "patterns mean the outermost modules that can be",
                 "[runtime][R52]") {
  auto all = decide({"*"});
  auto lines = all.remarks.lines();
  REQUIRE(lines.size() == 2);
  CHECK(lines[0]
        == "computed again in backward: body.*, list.0, list.1 and 1 more");
  CHECK_THAT(lines[1],
             ContainsSubstring("not computed again in backward, as its calls "
                               "cannot be seen")
               && ContainsSubstring(": hidden"));
  CHECK(decide({"list.*", "seen"}).chosen.size() == 3);
  auto grouped = decide({"body"}, {"group_2", false});
  CHECK(grouped.remarks.lines().at(0)
        == "computed again in backward, up to 2 together, with other random "
           "numbers: body.*");
}

TEST_CASE_METHOD(fixture, "code marks modules inside each other",
                 "[runtime][R52]") {
  marked[identity("body.1")] = {};
  marked[identity("seen")] = {};
  CHECK(decide({}).chosen.size() == 2);
  CHECK(decide({"body", "seen"}).chosen.size() == 3);
}

TEST_CASE_METHOD(fixture, "what cannot be computed again is an error by name",
                 "[runtime][R52]") {
  CHECK_THAT(refusal({"boddy"}),
             ContainsSubstring("no module is called \"boddy\"; the model has "
                               "body, list, seen, hidden"));
  CHECK_THAT(refusal({"list.7*"}),
             ContainsSubstring("no module is called \"list.7*\"; 'list' has 0, "
                               "1"));
  CHECK_THAT(refusal({"hidden"}),
             ContainsSubstring("'hidden' cannot be computed again")
               && ContainsSubstring("smp::submodule"));
  CHECK_THAT(refusal({"list"}),
             ContainsSubstring("'list' cannot be computed again: it is a "
                               "container"));
  CHECK_THAT(refusal({"seen"}, {"contiguous"}),
             ContainsSubstring("none of the modules is a Sequential"));
  stateful[identity("seen")] = "counts its calls";
  CHECK_THAT(refusal({"seen"}),
             ContainsSubstring("'seen' has state that smp cannot put back (it "
                               "counts its calls)"));
  marked[identity("seen")] = {};
  CHECK_THAT(refusal({}), ContainsSubstring("activation checkpointing of "
                                            "'seen'"));
  marked = {{identity("hidden"), {}}};
  CHECK_THAT(refusal({}), ContainsSubstring("'hidden'"));
}

TEST_CASE_METHOD(fixture, "options of a Sequential are for a Sequential",
                 "[runtime][R52]") {
  auto said = [](const activation_checkpointing& x, bool sequential) {
    return error_of([&] { check_checkpointing(x, sequential); });
  };
  for (auto* strategy : {"each", "contiguous", "group_2", "group_12"})
    CHECK(said({strategy}, true) == "no error");
  for (auto* strategy : {"", "group_", "group_0", "group_x", "group_2 ", "all"})
    CHECK_THAT(said({strategy}, true), ContainsSubstring("the strategy is"));
  CHECK_THAT(said({"group_2"}, false), ContainsSubstring("of a Sequential"));
  CHECK_THAT(said({"each", true, true}, false),
             ContainsSubstring("pack_args_as_tuple"));
  CHECK(said({"each", true, true}, true) == "no error");
}
