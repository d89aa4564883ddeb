#include "tests/support/catch.hpp"

#include "runtime/base/rank_context.hpp"
#include "runtime/calls/caller.hpp"
#include "runtime/calls/invoker.hpp"
#include "runtime/intercept/call_scope.hpp"
#include "runtime/intercept/hooks.hpp"
#include "runtime/intercept/local_modules.hpp"
#include "runtime/model/model_map.hpp"
#include "tests/support/error_of.hpp"
#include "tests/support/torch/lone_rank.hpp"

#include <ATen/ATen.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

// What interceptors can do with a call whose arguments are packed.

using namespace smp;

namespace {

/// Instead of a module's code.
invocation twice(torch::nn::Module&, unpacker& in,
                 const std::vector<value>& args, packer& out) {
  return {put_value(out, get_value<at::Tensor>(in, args.at(0)) * 2), {}};
}

const uint64_t twice_id = register_invoker("local_modules_test: twice", &twice);

class wrapping final : public call_interceptor {
public:
  using function = std::function<std::optional<invocation>(const packed_call&,
                                                           unpacker&, packer&)>;

  std::optional<invocation> around(const packed_call& x, unpacker& in,
                                   packer& out) override {
    ++heard;
    return code ? code(x, in, out) : std::nullopt;
  }

  function code; // none: leaves the call to others
  int heard = 0;
};

struct local_fixture {
  local_fixture() {
    target.invoker = twice_id;
    context.map = &map;
    set_interceptor(interceptor::recompute, &outer);
    set_interceptor(interceptor::offload, &inner);
  }

  ~local_fixture() {
    set_interceptor(interceptor::recompute, nullptr);
    set_interceptor(interceptor::offload, nullptr);
  }

  /// @returns what the module makes of ones, in a region
  at::Tensor call() {
    std::vector<at::Tensor> given{at::ones({2})};
    unpacker in{given};
    packer out;
    auto done = modules.run_inside({modules, module_id{0}, target, args, 1}, in,
                                   out);
    unpacker found{out.tensors()};
    return get_value<at::Tensor>(found, done.result);
  }

  std::shared_ptr<torch::nn::Module>
    model = std::make_shared<torch::nn::Module>();
  model_map map{rank_id{0}, 1, walk(*model)};
  model_context context;
  local_modules modules{context};
  call_target target;
  std::vector<value> args{value::tensor(0)};
  wrapping outer, inner;
};

} // namespace

TEST_CASE_METHOD(local_fixture,
                 "interceptors run a packed call from outside to inside",
                 "[runtime][intercept]") {
  std::vector<std::string> lines;
  auto noted = [&](const std::string& name) -> wrapping::function {
    return [&lines, name](const packed_call& x, unpacker& in, packer& out) {
      lines.push_back(name);
      std::optional result{x.modules.run_inside(x, in, out)};
      lines.push_back(name + " is done");
      return result;
    };
  };
  outer.code = noted("outer");
  inner.code = noted("inner");
  CHECK(at::equal(call(), at::full({2}, 2.0)));
  CHECK(lines
        == std::vector<std::string>{"outer", "inner", "inner is done",
                                    "outer is done"});
}

TEST_CASE_METHOD(local_fixture,
                 "a call that an interceptor runs again later does not come "
                 "back to it",
                 "[runtime][intercept][R52]") {
  std::optional<packed_call> kept;
  outer.code = [&](const packed_call& x, unpacker&, packer&) {
    kept.emplace(x);
    return std::optional<invocation>{};
  };
  CHECK(at::equal(call(), at::full({2}, 2.0)));
  REQUIRE(kept);
  std::vector<at::Tensor> others{at::full({2}, 3.0)};
  unpacker in{others};
  packer out;
  modules.run_inside(*kept, in, out);
  CHECK(at::equal(out.tensors().at(0), at::full({2}, 6.0)));
  CHECK(outer.heard == 1);
  CHECK(inner.heard == 2);
}

TEST_CASE_METHOD(local_fixture,
                 "an interceptor that answers a call keeps it from the others",
                 "[runtime][intercept]") {
  outer.code = [](const packed_call&, unpacker&, packer& out) {
    return std::optional{invocation{put_value(out, at::zeros({2})), {}}};
  };
  CHECK(at::equal(call(), at::zeros({2})));
  CHECK(inner.heard == 0);
}

TEST_CASE_METHOD(local_fixture,
                 "a call of no region is not offered to interceptors",
                 "[runtime][intercept]") {
  std::vector<at::Tensor> given{at::ones({2})};
  unpacker in{given};
  packer out;
  modules.run(module_id{0}, target, in, args, out);
  CHECK(at::equal(out.tensors().at(0), at::full({2}, 2.0)));
  CHECK(outer.heard == 0);
  CHECK(inner.heard == 0);
}

TEST_CASE("a range without a child of a Sequential is refused",
          "[runtime][intercept][R8]") {
  test::lone_rank rank; // in a step, where backward may come
  torch::nn::Sequential net{torch::nn::Linear(2, 2), torch::nn::Linear(2, 2)};
  auto walked = walk(*net);
  install_hooks(walked);
  model_map map{rank_id{0}, 1, std::move(walked)};
  model_context context;
  context.map = &map;
  local_modules modules{context};
  auto run = [&](uint32_t first, uint32_t last) {
    call_target target;
    target.kind = request_kind::range;
    target.first = first;
    target.last = last;
    target.training = true;
    std::vector<at::Tensor> given{at::ones({1, 2})};
    unpacker in{given};
    packer out;
    // As a Sequential has it: of the type at 0, a tensor.
    std::vector<value> args{
      value::tuple({value::of(int64_t{0}), value::tensor(0)})};
    return test::cause_of(
      [&] { modules.run(module_id{0}, target, in, args, out); },
      error_code::protocol);
  };
  CHECK(run(0, 2) == "no error");
  using ranges = std::vector<std::pair<uint32_t, uint32_t>>;
  for (auto [first, last] : ranges{{0, 0}, {1, 0}, {1, 1}, {2, 2}, {0, 3}})
    CHECK(run(first, last) == "no such range of a Sequential");
}
