#include "tests/support/catch.hpp"

#include "runtime/model/module_list.hpp"
#include "tests/support/error_of.hpp"

#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/linear.h>

#include <string>
#include <vector>

// Modules as a configuration lists them.

using namespace smp;
using namespace smp::test;

namespace {

using torch::nn::Linear;

struct block_impl : torch::nn::Module {
  block_impl() {
    register_module("up", up);
    register_module("down", down);
  }

  Linear up{2, 2}, down{2, 2};
};
TORCH_MODULE_IMPL(block, block_impl);

/// Three blocks, and a module with two names.
struct listed_impl : torch::nn::Module {
  listed_impl() {
    for (int i = 0; i < 3; ++i)
      layer->push_back(block{});
    register_module("layer", layer);
    register_module("head", head);
    register_module("tied", head);
  }

  torch::nn::ModuleList layer;
  Linear head{2, 2};
};
TORCH_MODULE_IMPL(listed, listed_impl);

struct listed_fixture {
  using names = std::vector<std::string>;

  /// @returns first names of what is in the list
  names in(const names& entries) const {
    const module_list list{walked, entries};
    list.check("a.key");
    names result;
    for (uint32_t i = 0; i < walked.modules.size(); ++i)
      if (list.contains(i))
        result.push_back(walked.modules[i].names.front());
    return result;
  }

  std::string refusal(const names& entries) const {
    return error_of([&] { in(entries); }, error_code::config);
  }

  uint32_t at(const std::string& name) const {
    return walked.find_module(name).value();
  }

  listed model;
  walked_model walked = walk(*model);
};

} // namespace

TEST_CASE_METHOD(listed_fixture, "a name means a module with all below it",
                 "[runtime][model]") {
  CHECK(in({}) == names{});
  CHECK(in({"layer.1"}) == names{"layer.1", "layer.1.up", "layer.1.down"});
  CHECK(in({"*.up", "tied"})
        == names{"layer.0.up", "layer.1.up", "layer.2.up", "head"});
}

TEST_CASE_METHOD(listed_fixture,
                 "of the entries that fit a module the last one decides",
                 "[runtime][model]") {
  CHECK(in({"layer.*", "!layer.1", "!layer.2"})
        == names{"layer.0", "layer.0.up", "layer.0.down"});
  CHECK(in({"*", "!layer"}) == names{"head"});
  CHECK(in({"layer.2", "head", "!tied"})
        == names{"layer.2", "layer.2.up", "layer.2.down"});
  CHECK(in({"*", "!layer", "layer.0", "!*.down"})
        == names{"layer.0", "layer.0.up", "head"});
  CHECK(in({"layer.0", "!*.down", "layer.0"})
        == names{"layer.0", "layer.0.up", "layer.0.down"});
}

TEST_CASE_METHOD(listed_fixture, "a list tells which entry leaves a module out",
                 "[runtime][model]") {
  const names entries{"layer", "!layer.0", "layer.0.up"};
  const module_list list{walked, entries};
  CHECK(list.left_out_by(at("layer.0")) == &entries[1]);
  CHECK(list.left_out_by(at("layer.0.down")) == &entries[1]);
  CHECK(list.left_out_by(at("layer.0.up")) == nullptr);
  CHECK(list.left_out_by(at("layer.1")) == nullptr);
  CHECK(list.left_out_by(at("head")) == nullptr); // nor named
}

TEST_CASE_METHOD(listed_fixture, "a list tells what names a module itself",
                 "[runtime][model]") {
  using positions = std::vector<size_t>;
  const names entries{"layer", "layer.*", "!layer.0", "*.up", "layer.0.up"};
  const module_list list{walked, entries};
  CHECK(list.naming(at("layer")) == positions{0});
  CHECK(list.naming(at("layer.0")) == positions{1});
  CHECK(list.naming(at("layer.0.up")) == positions{1, 3, 4});
  CHECK(list.naming(at("head")) == positions{});
}

TEST_CASE_METHOD(listed_fixture, "an entry that does nothing is an error",
                 "[runtime][model]") {
  CHECK(refusal({"head", "layer.x"})
        == "a.key: no module is called \"layer.x\"; 'layer' has 0, 1, 2");
  CHECK(refusal({"layer.*", "!layer.7"})
        == "a.key: no module is called what \"!layer.7\" takes away; 'layer' "
           "has 0, 1, 2");
  CHECK(refusal({"layer.1", "!layer.2"})
        == "a.key: \"!layer.2\" takes nothing away, as no entry before it "
           "names 'layer.2'");
  CHECK(refusal({"layer.1", "!layer.1", "!layer.1.up"})
        == "a.key: \"!layer.1.up\" takes nothing away, as no entry before it "
           "names 'layer.1.up'");
  CHECK(refusal({"!head", "*"})
        == "a.key: \"!head\" takes nothing away, as no entry before it names "
           "'head'");
}
