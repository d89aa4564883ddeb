#include "tests/support/catch.hpp"

#include "runtime/model/module_walk.hpp"

#include <torch/nn/modules/linear.h>

#include <memory>

using namespace smp;

namespace {

/// A module under two names, below another one.
struct twice : torch::nn::Module {
  twice() {
    register_module("first", inner);
    register_module("second", inner);
  }

  torch::nn::Linear inner{2, 2};
};

struct root : torch::nn::Module {
  root() {
    register_module("body", std::make_shared<twice>());
    register_module("head", torch::nn::Linear{2, 2});
  }
};

} // namespace

TEST_CASE("a module is found by each of its names", "[runtime][model]") {
  auto x = std::make_shared<root>();
  auto model = walk(*x);
  CHECK(model.find_module("") == 0);
  auto shared = model.find_module("body.first");
  REQUIRE(shared);
  CHECK(model.modules[*shared].object
        == x->named_modules()["body.first"].get());
  CHECK(model.find_module("body.second") == shared);
  CHECK(model.find_module("head"));
  CHECK(model.find_module("head") != shared);
  CHECK_FALSE(model.find_module("first"));
  CHECK_FALSE(model.find_module("body.third"));
}

TEST_CASE("a walked model keeps a module whose place another one takes",
          "[runtime][model]") {
  auto x = std::make_shared<root>();
  auto model = walk(*x);
  auto position = model.find_module("head");
  REQUIRE(position);
  std::weak_ptr<torch::nn::Module> before = x->named_children()["head"];
  x->replace_module("head", torch::nn::Linear{2, 2});
  auto now = x->named_children()["head"];
  CHECK(model.modules[*position].object != now.get());
  REQUIRE_FALSE(before.expired());
  CHECK(model.modules[*position].object == before.lock().get());
}
