#include "tests/support/catch.hpp"

#include "runtime/base/rank_context.hpp"
#include "runtime/deferred/deferred_init.hpp"
#include "runtime/lazy/placeholder.hpp"
#include "runtime/lazy/promise.hpp"

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/nn/functional/loss.h>
#include <torch/types.h>

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

// Operators with several `out` arguments return references to them, and
// LibTorch's boxed kernels follow those after they took the arguments off the
// stack. TorchScript calls them so, and the stack may be their only owner.

using namespace smp;
using torch::Tensor;

namespace {

/// A promise whose content is here.
struct kept_source : promise_source {
  explicit kept_source(Tensor x) : content_(std::move(x)) {
    // nop
  }

  std::vector<int64_t> sizes() override {
    return content_.sizes().vec();
  }

  completion_ptr content() override {
    auto result = std::make_shared<completion>();
    result->set();
    return result;
  }

  Tensor take() override {
    return content_.clone();
  }

  wait_reason why() const override {
    return {};
  }

  Tensor content_;
};

Tensor promise_of(const Tensor& x) {
  return make_promise(std::make_shared<kept_source>(x), x.scalar_type());
}

/// A rank whose model has one parameter, of another rank.
class fetching_rank final : public rank_context, private placeholder_source {
public:
  explicit fetching_rank(Tensor x) : content_(std::move(x)) {
    model_ = std::make_shared<model_context>();
    model_->placeholders = this;
    rank_context::set_current(this);
  }

  ~fetching_rank() override {
    rank_context::set_current(nullptr);
  }

private:
  uint32_t position(const Tensor&) const override {
    return 0;
  }

  bool is_buffer(uint32_t) const override {
    return false;
  }

  Tensor fetch(uint32_t) override {
    return content_.clone();
  }

  void store(uint32_t, const Tensor&) override {
    throw std::logic_error{"the test has no buffer"};
  }

  void lend(uint32_t, const Tensor&) override {
    throw std::logic_error{"the test has no buffer"};
  }

  [[noreturn]] void refuse_write(uint32_t,
                                 const std::string& op) const override {
    throw std::logic_error{op};
  }

  bool run_at_owner(const c10::OperatorHandle&, torch::jit::Stack&) override {
    return false;
  }

  Tensor content_;
};

c10::OperatorHandle operator_named(const char* name, const char* overload) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, overload);
}

/// Calls the operator with a stack that alone owns the last two arguments.
/// @returns its two results, which must be those arguments
std::vector<Tensor> call(const c10::OperatorHandle& op,
                         torch::jit::Stack stack) {
  // These keep the two objects readable, though not alive.
  using watch = c10::weak_intrusive_ptr<c10::TensorImpl>;
  auto n = stack.size();
  watch first{stack[n - 2].toTensor().getIntrusivePtr()};
  watch second{stack[n - 1].toTensor().getIntrusivePtr()};
  REQUIRE(first.use_count() == 1);
  REQUIRE(second.use_count() == 1);
  op.callBoxed(&stack);
  REQUIRE(stack.size() == 2);
  std::vector<Tensor> result{stack[0].toTensor(), stack[1].toTensor()};
  CHECK(result[0].unsafeGetTensorImpl() == first._unsafe_get_target());
  CHECK(result[1].unsafeGetTensorImpl() == second._unsafe_get_target());
  // The stack's handle and the one in `result`. An object that was freed
  // has lost its storage.
  for (auto& x : result) {
    CHECK(x.use_count() == 2);
    REQUIRE(x.unsafeGetTensorImpl()->has_storage());
  }
  return result;
}

/// The loss of `x: [N, C]`, into tensors that nobody else holds.
std::vector<Tensor> loss_of(const Tensor& x, const Tensor& classes) {
  torch::jit::Stack stack{x, classes, c10::IValue{}, at::Reduction::Mean,
                          int64_t{-100}};
  stack.emplace_back(at::empty({0}));
  stack.emplace_back(at::empty({0}));
  return call(operator_named("aten::nll_loss_forward", "output"),
              std::move(stack));
}

struct loss_of_classes {
  Tensor x = torch::log_softmax(
    torch::sin(torch::arange(2048.0)).view({64, 32}), 1);
  Tensor classes = torch::arange(64).remainder(32);
  Tensor expected = -x.gather(1, classes.unsqueeze(1)).mean();
};

} // namespace

TEST_CASE("outputs that only the stack owns outlive a promised argument",
          "[runtime][promise]") {
  loss_of_classes given;
  auto results = loss_of(promise_of(given.x), given.classes);
  CHECK(torch::allclose(results[0], given.expected));
  CHECK(results[1].item<float>() == 64);
}

TEST_CASE("outputs that only the stack owns outlive a fetched argument",
          "[runtime][placeholder][R14]") {
  loss_of_classes given;
  fetching_rank rank{given.x};
  auto x = given.x.clone();
  make_placeholder(x, nullptr);
  REQUIRE(is_placeholder(x));
  auto results = loss_of(x, given.classes);
  CHECK(torch::allclose(results[0], given.expected));
  CHECK(results[1].item<float>() == 64);
}

TEST_CASE("outputs that only the stack owns outlive a deferred argument",
          "[runtime][delay]") {
  auto inside = GENERATE(false, true);
  loss_of_classes given;
  Tensor x;
  {
    delay_param_initialization scope;
    x = torch::arange(2048.0).view({64, 32}).sin().log_softmax(1);
  }
  REQUIRE(is_deferred(x));
  std::vector<Tensor> results;
  {
    delay_param_initialization scope{inside};
    results = loss_of(x, given.classes);
  }
  CHECK(torch::allclose(results[0], given.expected));
  CHECK(results[1].item<float>() == 64);
}
