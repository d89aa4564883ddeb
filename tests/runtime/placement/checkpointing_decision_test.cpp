#include "tests/support/catch.hpp"

#include "runtime/intercept/submodule.hpp"
#include "runtime/placement/checkpointing_decision.hpp"
#include "runtime/placement/partitioning.hpp"
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

TEST_CASE_METHOD(fixture, "what is taken away is not computed again",
                 "[runtime][R52]") {
  auto lines = decide({"*", "!list.0", "!hidden"}).remarks.lines();
  REQUIRE(lines.size() == 1);
  CHECK(lines[0] == "computed again in backward: body.*, list.1, seen");
  auto some = decide({"body", "!body.1", "!body.3"}, {"contiguous"});
  CHECK(some.remarks.lines().at(0)
        == "computed again in backward, what follows each other on a rank "
           "together: body.* without body.1 and body.3");
  // What has state that nobody can put back may be left out.
  stateful[identity("body.2")] = "counts its calls";
  CHECK(decide({"body", "!body.2"}).chosen.size() == 1);
}

TEST_CASE_METHOD(fixture, "a child that is left out is in no region",
                 "[runtime][R52]") {
  std::vector<rank_id> owners(walked.modules.size(), rank_id{0});
  auto found = [&](std::vector<std::string> modules, const char* strategy) {
    auto all = regions_of(walked, decide(std::move(modules), {strategy}).chosen,
                          owners);
    std::vector<uint32_t> result;
    for (auto child :
         walked.modules[walked.find_module("body").value()].children)
      result.push_back(all[child].region);
    return result;
  };
  auto first = walked.find_module("body.0").value() + 1;
  // Children stand behind each other in the walk.
  using regions = std::vector<uint32_t>;
  CHECK(found({"body", "!body.1"}, "contiguous")
        == regions{first, 0, first + 2, first + 2, first + 2});
  CHECK(found({"body", "!body.0", "!body.4"}, "group_2")
        == regions{0, first + 1, first + 1, first + 3, 0});
  CHECK(found({"body", "!body.0"}, "each")
        == regions{0, first + 1, first + 2, first + 3, first + 4});
}

TEST_CASE_METHOD(fixture, "what takes away all, or nothing, is an error",
                 "[runtime][R52]") {
  CHECK_THAT(refusal({"seen", "!seen"}),
             ContainsSubstring("activation_checkpointing.modules: 'seen' "
                               "cannot be computed again: \"!seen\" excludes "
                               "'seen'"));
  CHECK_THAT(refusal({"body", "!body.*"}),
             ContainsSubstring("'body' cannot be computed again: everything in "
                               "it is excluded"));
  CHECK_THAT(refusal({"body", "!seen"}),
             ContainsSubstring("activation_checkpointing.modules: \"!seen\" "
                               "takes nothing away"));
  CHECK_THAT(refusal({"body", "!body.7"}),
             ContainsSubstring("no module is called what \"!body.7\" takes "
                               "away; 'body' has 0, 1, 2, 3, 4"));
  CHECK_THAT(refusal({"body", "body.1"}),
             ContainsSubstring("what \"body.1\" names is part of what others "
                               "name"));
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
