#include "tests/support/catch.hpp"

#include "runtime/lazy/promise.hpp"
#include "tests/support/error_of.hpp"
#include "transport/error.hpp"
#include "transport/refuse_waits.hpp"

#include <ATen/autocast_mode.h>
#include <torch/nn/functional/normalization.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <atomic>
#include <functional>
#include <optional>
#include <sstream>
#include <thread>

// Promises alone, without ranks: whatever touches them must see what an
// ordinary tensor would show (R38, R41).

using namespace smp;
using namespace smp::test;
using torch::Tensor;

namespace {

namespace ag = torch::autograd;

/// Content that is there when somebody waits, and counts who did.
struct ready_source : promise_source {
  explicit ready_source(Tensor x) : content_(std::move(x)) {
    // nop
  }

  std::vector<int64_t> sizes() override {
    ++looked;
    return content_.sizes().vec();
  }

  std::optional<std::vector<int64_t>> strides() override {
    return told ? std::optional{content_.strides().vec()} : std::nullopt;
  }

  completion_ptr content() override {
    auto result = std::make_shared<completion>();
    if (fault)
      result->fail(fault);
    else
      result->set();
    return result;
  }

  Tensor take() override {
    ++taken;
    return content_.clone();
  }

  wait_reason why() const override {
    return {"'somewhere', forward", rank_id{1}};
  }

  Tensor content_;
  failure fault;
  bool told = true; // its strides
  std::atomic<int> looked = 0;
  std::atomic<int> taken = 0;
};

Tensor numbers() {
  return torch::sin(torch::arange(32, torch::kDouble)).view({4, 8});
}

/// A promise and its source.
struct promised {
  explicit promised(Tensor x = numbers())
    : source(std::make_shared<ready_source>(x)),
      tensor(make_promise(source, x.scalar_type())) {
    // nop
  }

  std::shared_ptr<ready_source> source;
  Tensor tensor;
};

Tensor fresh() {
  return promised{}.tensor;
}

/// @returns `f` of an ordinary leaf, its gradient, and the same of a promise.
bool same(const std::function<Tensor(Tensor)>& f) {
  auto run = [&](Tensor leaf) {
    leaf.set_requires_grad(true);
    auto out = f(leaf);
    if (out.requires_grad())
      out.to(torch::kDouble).square().sum().backward();
    return std::pair{out.detach(), leaf.grad()};
  };
  auto [x, gx] = run(numbers());
  auto [y, gy] = run(fresh());
  return torch::equal(x, y) && gx.defined() == gy.defined()
         && (!gx.defined() || torch::equal(gx, gy));
}

} // namespace

TEST_CASE("sizes of a promise are known before its content is fetched",
          "[runtime][promise]") {
  promised p;
  auto& y = p.tensor;
  CHECK(y.scalar_type() == torch::kDouble);
  CHECK(y.device().is_cpu());
  CHECK(p.source->looked == 0);
  CHECK(y.sizes() == at::IntArrayRef({4, 8}));
  CHECK(y.dim() == 2);
  CHECK(y.size(-1) == 8);
  CHECK(y.numel() == 32);
  CHECK(y.stride(0) == 8);
  CHECK(y.is_contiguous());
  // What TorchScript's x.size(0) becomes.
  CHECK(at::size(y, 0) == 4);
  CHECK(at::is_same_size(y, fresh()));
  CHECK(y.is_floating_point());
  CHECK(p.source->looked == 1);
  CHECK(p.source->taken == 0);
  CHECK(is_promise(y));
}

TEST_CASE("strides of a promise are those of its content",
          "[runtime][promise][R41][R63]") {
  auto image = torch::arange(120, torch::kDouble).view({2, 4, 5, 3});
  const Tensor contents[] = {
    numbers(), numbers().t(), image.permute({0, 3, 1, 2}),
    torch::ones({2, 4, 5, 1}, torch::kDouble).permute({0, 3, 1, 2}),
    torch::ones({2, 1, 4, 5}, torch::kDouble)};
  for (auto& x : contents)
    for (auto told : {true, false}) {
      CAPTURE(x.sizes(), x.strides(), told);
      auto with_promise = [&](auto f) {
        promised p{x};
        p.source->told = told;
        auto same = f(p.tensor) == f(x);
        // Only the content tells, where nobody else does.
        return same && is_promise(p.tensor) == told;
      };
      using format = at::MemoryFormat;
      CHECK(with_promise([](const Tensor& y) { return y.strides().vec(); }));
      CHECK(with_promise([](const Tensor& y) { return y.is_contiguous(); }));
      CHECK(with_promise(
        [](const Tensor& y) { return y.is_contiguous(format::ChannelsLast); }));
      CHECK(with_promise(
        [](const Tensor& y) { return y.suggest_memory_format(); }));
    }
}

TEST_CASE("an operation makes a promise an ordinary tensor in place",
          "[runtime][promise]") {
  promised p;
  auto other = p.tensor;
  CHECK(torch::equal(p.tensor + 1, numbers() + 1));
  CHECK_FALSE(is_promise(other));
  CHECK(p.source->taken == 1);
  CHECK(torch::equal(other, numbers()));
  CHECK(p.source.use_count() == 1); // nothing of the promise is left
  CHECK(p.source->taken == 1);
}

TEST_CASE("reading the memory of a promise fetches it", "[runtime][promise]") {
  CHECK(fresh().data_ptr() != nullptr);
  auto y = fresh();
  CHECK(y.accessor<double, 2>()[1][2] == numbers()[1][2].item<double>());
  CHECK(fresh().storage().nbytes() == 32 * sizeof(double));
  CHECK(fresh()[0][3].item<double>() == numbers()[0][3].item<double>());
  std::ostringstream out;
  out << fresh();
  CHECK(out.str().find("CPUDoubleType{4,8}") != std::string::npos);
}

TEST_CASE(
  "operations on promises have the results and gradients of ordinary "
  "tensors",
  "[runtime][promise]") {
  auto w = torch::cos(torch::arange(24, torch::kDouble)).view({3, 8});
  CHECK(same([](Tensor x) { return x * 2 + fresh(); }));
  CHECK(same([](Tensor x) { return at::stack({x, fresh(), x.exp()}); }));
  CHECK(same([](Tensor x) { return at::cat({x, fresh()}, 1); }));
  CHECK(same([](Tensor x) {
    return at::meshgrid({x.flatten(), fresh().flatten()}, "ij")[0];
  }));
  CHECK(same([](Tensor x) {
    c10::List<std::optional<Tensor>> at;
    at.push_back(std::nullopt);
    at.push_back(torch::tensor({0, 1}));
    return at::index(x, at);
  }));
  CHECK(same([&](Tensor x) { return at::linear(x, w, Tensor()); }));
  CHECK(same([&](Tensor x) {
    return at::linear(torch::ones({2, 8}, torch::kDouble), x);
  }));
  CHECK(same([](Tensor x) { return at::layer_norm(x, {8}); }));
  CHECK(same([](Tensor x) {
    torch::manual_seed(3);
    return at::dropout(x, 0.5, true);
  }));
  CHECK(same([](Tensor x) {
    auto q = x.view({1, 1, 4, 8});
    return at::scaled_dot_product_attention(q, q, q);
  }));
  CHECK(same([](Tensor x) { return at::where(fresh() > 0, x, x * 3); }));
  CHECK(same([](Tensor x) { return x.view({2, 16}).t().reshape({-1}); }));
  CHECK(same([](Tensor x) { return x.slice(0, 1, 3).select(1, 2); }));
  CHECK(same([](Tensor x) {
    auto y = fresh(); // changed in place, as the base of a view
    y.view({2, 16}).mul_(x.view({2, 16}));
    return y;
  }));
  CHECK(same([](Tensor x) {
    auto y = fresh();
    y.add_(x);
    y.slice(0, 0, 2).mul_(0.5);
    y.select(1, 3).zero_();
    return y;
  }));
  CHECK(same([](Tensor x) { return x.detach() + 1; }));
  CHECK(same([](Tensor x) {
    torch::NoGradGuard off;
    return x + 1;
  }));
}

TEST_CASE("in-place changes of shape are those of the promise itself",
          "[runtime][promise]") {
  torch::NoGradGuard off;
  auto y = fresh();
  y.t_();
  CHECK(y.size(0) == 8);
  CHECK_FALSE(y.is_contiguous());
  y.unsqueeze_(0);
  CHECK(y.dim() == 3);
  y.resize_({2, 2});
  CHECK(y.numel() == 4);
  CHECK(y.is_contiguous());
  auto z = fresh();
  z.set_data(torch::ones({2, 3}, torch::kDouble));
  CHECK(z.size(1) == 3);
  CHECK_FALSE(is_promise(z));
  auto p = torch::zeros({1}, torch::kDouble);
  auto x = fresh();
  p.set_data(x);
  CHECK_FALSE(is_promise(x));
  CHECK(p.data_ptr() == x.data_ptr());
  CHECK(p.size(1) == 8);
}

TEST_CASE("shallow copies of a promise share its memory",
          "[runtime][promise]") {
  auto y = fresh();
  auto d = y.detach();
  CHECK(d.is_alias_of(y));
  CHECK_FALSE(is_promise(d));
  auto v = fresh();
  CHECK(v.variable_data().data_ptr() == v.data_ptr());
  auto t = fresh();
  CHECK(t.tensor_data().data_ptr() == t.data_ptr());
  auto counted = fresh();
  auto before = counted._version();
  counted.add_(1);
  CHECK(counted._version() == before + 1);
}

TEST_CASE("autograd treats a promise as the tensor that it becomes",
          "[runtime][promise]") {
  auto y = fresh();
  y.set_requires_grad(true);
  auto calls = 0;
  y.register_hook([&](Tensor g) {
    ++calls;
    return g * 2;
  });
  (y * 3).sum().backward();
  CHECK(calls == 1);
  CHECK(y.grad()[0][0].item<double>() == 6);
  auto z = fresh();
  z.set_requires_grad(true);
  auto w = z * 1;
  w.retain_grad();
  w.sum().backward();
  CHECK(w.grad().defined());
}

TEST_CASE("a function that only saves a promise does not fetch it",
          "[runtime][promise]") {
  struct saves : ag::Function<saves> {
    static Tensor forward(ag::AutogradContext* c, Tensor x) {
      c->save_for_backward({x});
      return torch::ones({4, 8}, torch::kDouble);
    }
    static ag::variable_list backward(ag::AutogradContext* c,
                                      ag::variable_list g) {
      return {g[0] * c->get_saved_variables()[0]};
    }
  };
  auto y = fresh();
  y.set_requires_grad(true);
  auto z = saves::apply(y);
  CHECK(is_promise(y));
  z.sum().backward();
  CHECK(torch::equal(y.grad(), numbers()));
  struct returns : ag::Function<returns> {
    static Tensor forward(ag::AutogradContext* c, Tensor x) {
      c->save_for_backward({x});
      return x;
    }
    static ag::variable_list backward(ag::AutogradContext* c,
                                      ag::variable_list g) {
      return {g[0] * c->get_saved_variables()[0]};
    }
  };
  CHECK(same([](Tensor x) { return returns::apply(x); }));
}

TEST_CASE("a promise of inference mode becomes an inference tensor",
          "[runtime][promise]") {
  c10::InferenceMode on;
  auto y = fresh();
  CHECK(y.is_inference());
  CHECK((y + 1).is_inference());
  y.add_(1);
  CHECK(torch::equal(y, numbers() + 1));
}

TEST_CASE("autocast sees a promise with its type", "[runtime][promise]") {
  at::autocast::set_autocast_enabled(at::kCPU, true);
  at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
  auto y = promised{numbers().to(torch::kFloat)}.tensor;
  auto z = at::mm(y, torch::ones({8, 8}));
  at::autocast::set_autocast_enabled(at::kCPU, false);
  at::autocast::clear_cache();
  CHECK(z.scalar_type() == torch::kBFloat16);
}

TEST_CASE(
  "a promise fails with its first cause wherever it is touched, and "
  "stays a promise",
  "[runtime][promise]") {
  promised p;
  p.source->fault = {error_code::user_code, rank_id{1}, "m", "no space left"};
  auto& y = p.tensor;
  auto text = [](auto f) { return cause_of(f); };
  CHECK(text([&] { y.sum(); }) == "no space left");
  CHECK(text([&] { y.data_ptr(); }) == "no space left");
  CHECK(text([&] { y.mean().item<double>(); }) == "no space left");
  CHECK(text([&] { at::cat({y, fresh()}); }) == "no space left");
  CHECK(is_promise(y));
  p.source->fault = {};
  CHECK(torch::equal(y, numbers()));
}

TEST_CASE("many threads may touch one promise", "[runtime][promise]") {
  for (int i = 0; i < 50; ++i) {
    promised p;
    std::vector<std::thread> threads;
    std::atomic<int> right = 0;
    for (int k = 0; k < 8; ++k)
      threads.emplace_back([&, k] {
        auto y = p.tensor;
        if (k % 2 == 0)
          right += y.size(0) == 4;
        else
          right += torch::equal(y * 2, numbers() * 2);
      });
    for (auto& t : threads)
      t.join();
    CHECK(right == 8);
    CHECK(p.source->taken == 1);
  }
}

TEST_CASE("one operation waits once for all its promises",
          "[runtime][promise]") {
  struct counting : waiter {
    void wait(const completion_ptr& x, const wait_reason&) override {
      if (!x->done())
        for (auto& f : std::exchange(arrive, {}))
          ++waits, f();
    }
    std::vector<std::function<void()>> arrive;
    int waits = 0;
  } w;
  struct late : ready_source {
    using ready_source::ready_source;
    completion_ptr content() override {
      return done;
    }
    completion_ptr done = std::make_shared<completion>();
  };
  scoped_waiter here{w};
  std::vector<Tensor> xs;
  std::vector<std::shared_ptr<late>> sources;
  for (int i = 0; i < 5; ++i) {
    sources.push_back(std::make_shared<late>(numbers()));
    xs.push_back(make_promise(sources.back(), torch::kDouble));
  }
  w.arrive.push_back([&] {
    for (auto& x : sources)
      x->done->set();
  });
  CHECK(at::cat(xs).size(0) == 20);
  CHECK(w.waits == 1);
}

TEST_CASE("waits that have a place in an order are not put together",
          "[runtime][promise][deterministic][R33]") {
  struct counting : waiter {
    void wait(const completion_ptr&, const wait_reason&) override {
      ++waits;
    }
    int waits = 0;
  } w;
  struct in_order : ready_source {
    in_order(int number, std::vector<int>& log)
      : ready_source(numbers()), number(number), log(log) {
      // nop
    }
    completion_ptr content() override {
      return done;
    }
    void wait() override {
      log.push_back(number);
      done->set();
    }
    bool waits_in_order() const override {
      return true;
    }
    int number;
    std::vector<int>& log;
    completion_ptr done = std::make_shared<completion>();
  };
  scoped_waiter here{w};
  std::vector<int> log;
  std::vector<Tensor> xs;
  for (int i = 0; i < 3; ++i)
    xs.push_back(
      make_promise(std::make_shared<in_order>(i, log), torch::kDouble));
  CHECK(at::cat(xs).size(0) == 12);
  CHECK(w.waits == 0);
  CHECK(log == std::vector<int>{0, 1, 2});
}

TEST_CASE("a thread that must not wait cannot touch a promise, which stays one",
          "[runtime][promise]") {
  struct slow_source : ready_source {
    using ready_source::ready_source;

    std::vector<int64_t> sizes() override {
      waiter::current().wait(here, why());
      return ready_source::sizes();
    }

    completion_ptr content() override {
      return here;
    }

    completion_ptr here = std::make_shared<completion>();
  };
  auto source = std::make_shared<slow_source>(numbers());
  auto x = make_promise(source, torch::kDouble);
  std::vector<std::string> errors;
  std::thread other{[&] {
    refuse_waits("a thread of the actors");
    auto note = [&](const std::function<void()>& f) {
      try {
        f();
      } catch (const std::exception& e) {
        errors.push_back(e.what());
      }
    };
    note([&] { x.sum(); });
    note([&] { x.data_ptr(); });
    note([&] { x.sizes(); });
  }};
  other.join();
  REQUIRE(errors.size() == 3);
  for (auto& text : errors)
    CHECK_THAT(text, Catch::Matchers::ContainsSubstring(
                       "'somewhere', forward from rank 1 is waited for on a "
                       "thread of the actors, which must not wait"));
  CHECK(is_promise(x));
  source->here->set();
  CHECK(torch::equal(x, numbers()));
}
