// ctest: timeout=300
#include "tests/support/catch.hpp"

#include "runtime/lazy/promise.hpp"
#include "runtime/train/trainable.hpp"
#include "runtime/verify/call_log.hpp"
#include "runtime/verify/step_comparison.hpp"
#include "runtime/verify/verify.hpp"
#include "tests/support/torch_verify_jobs.hpp"

#include <nlohmann/json.hpp>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <limits>

using namespace smp;
using Catch::Matchers::ContainsSubstring;
using torch::Tensor;

namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();

Tensor with(const Tensor& x, int64_t index, double value) {
  auto result = x.clone();
  result.view({-1})[index] = value;
  return result;
}

} // namespace

// -- tensors ------------------------------------------------------------------

TEST_CASE("Tensors are equal up to R35's tolerance", "[runtime][verify]") {
  auto b = torch::tensor({1.0f, -4.0f, 0.5f, 0.0f}).view({2, 2});
  auto largest = 4.0;
  auto near = with(b, 2, 0.5 + 0.9 * (1e-5 * largest + 1e-7));
  auto far = with(b, 2, 0.5 + 1.1 * (1e-5 * largest + 1e-7));
  CHECK_FALSE(compare_tensors(b, b, {}).wrong);
  CHECK(compare_tensors(b, b, {}).relative == 0);
  CHECK_FALSE(compare_tensors(near, b, {}).wrong);
  auto x = compare_tensors(far, b, {});
  REQUIRE(x.wrong);
  CHECK(x.wrong->place == "element [1, 0]");
  CHECK(x.wrong->reference == "0.5");
  CHECK(x.wrong->bound == Catch::Approx(1e-5 * largest + 1e-7));
  CHECK(x.relative == Catch::Approx(1.1e-5).epsilon(0.05));
  CHECK(x.share == Catch::Approx(1.1).epsilon(0.01));
  CHECK(compare_tensors(near, b, {}).share == Catch::Approx(0.9).epsilon(0.01));
}

TEST_CASE("Rounding noise is shown as a share of what is allowed",
          "[runtime][verify]") {
  // Gradients that are zero but for rounding, as a key's bias in attention.
  auto noise = torch::tensor({1e-9f, -2e-9f}), other = -noise;
  auto x = compare_tensors(noise, other, {});
  CHECK_FALSE(x.wrong);
  CHECK(x.relative > 1);
  CHECK(x.share == Catch::Approx(4e-9 / (1e-5 * 2e-9 + 1e-7)).epsilon(0.01));
  // What counts is how close to wrong, not how far apart.
  verify_summary sum;
  sum.steps = 1;
  sum.gradients.add("gradient of 'noise'", x);
  auto b = torch::ones({2});
  sum.gradients.add("gradient of 'weight'",
                    compare_tensors(with(b, 0, 1 + 5e-6), b, {}));
  CHECK(sum.gradients.worst == "gradient of 'weight'");
  CHECK_THAT(to_text(sum),
             Catch::Matchers::ContainsSubstring(
               "% of what is allowed (gradient of 'weight', relative"));
}

TEST_CASE("The worst of several differences is shown", "[runtime][verify]") {
  auto b = torch::ones({3});
  auto x = compare_tensors(with(with(b, 0, 1.5), 2, 3.0), b, {});
  REQUIRE(x.wrong);
  CHECK(x.wrong->place == "element [2]");
  CHECK(x.wrong->pipeline == "3");
}

TEST_CASE("Values that are not finite equal only themselves",
          "[runtime][verify]") {
  auto one = torch::ones({3});
  auto nan = with(one, 1, std::nan(""));
  auto inf = with(one, 1, infinity);
  for (auto& x : {nan, inf})
    CHECK_FALSE(compare_tensors(x, x, {}).wrong);
  for (auto& [a, b] : std::vector<std::pair<Tensor, Tensor>>{{nan, one},
                                                             {one, nan},
                                                             {inf, one},
                                                             {one, inf},
                                                             {inf, -inf},
                                                             {nan, inf}})
    CHECK(compare_tensors(a, b, {}).wrong);
}

TEST_CASE("Tensors of other shapes or types differ", "[runtime][verify]") {
  auto x = compare_tensors(torch::ones({2, 3}), torch::ones({3, 2}), {});
  REQUIRE(x.wrong);
  CHECK(x.wrong->pipeline == "Float [2, 3]");
  CHECK(compare_tensors(torch::ones({2}), torch::ones({2}, torch::kDouble), {})
          .wrong);
}

TEST_CASE("Types with fewer digits have a wider tolerance",
          "[runtime][verify]") {
  auto b = torch::ones({4}, torch::kBFloat16);
  auto a = b + 0x1p-6;
  CHECK(compare_tensors(a, b, tolerance_for(torch::kFloat)).wrong);
  CHECK_FALSE(compare_tensors(a, b, tolerance_for(torch::kBFloat16)).wrong);
  CHECK(compare_tensors(b + 0.25, b, tolerance_for(torch::kBFloat16)).wrong);
}

TEST_CASE("An update is compared by what was added", "[runtime][verify]") {
  // 1e-5 of the largest value would hide a whole step of this size.
  auto before = torch::full({4}, 100.0f);
  auto b = before + 1e-3;
  CHECK_FALSE(compare_update(b, b, before).wrong);
  CHECK(compare_update(before, b, before).wrong);
  CHECK(compare_update(before + 2e-3, b, before).wrong);
}

// -- digests ------------------------------------------------------------------

TEST_CASE("A digest tolerates what a tensor tolerates", "[runtime][verify]") {
  auto n = GENERATE(1, 100, 256, 257, 5000, 100000);
  torch::manual_seed(n);
  auto b = torch::randn({n});
  auto bound = tolerance{}.bound(b.abs().max().item<double>());
  auto digest = digest_of(b);
  CHECK((digest == digest_of(b.clone())));
  CHECK(digest.sums.size() <= tensor_digest::pieces);
  // Every element off by almost the bound, in random directions.
  auto near = b + (torch::randint(2, {n}) * 2 - 1) * 0.9 * bound;
  CHECK_FALSE(compare_digests(digest_of(near), digest, {}));
  // Some elements off by much more.
  auto far = b + (torch::randint(2, {n}) * 2 - 1) * 100 * bound;
  CHECK(compare_digests(digest_of(far), digest, {}));
  CHECK(compare_digests(digest_of(with(b, n - 1, 7)), digest, {}));
}

TEST_CASE("A digest sees where elements stand", "[runtime][verify]") {
  torch::manual_seed(1);
  auto b = torch::randn({64, 64});
  CHECK(compare_digests(digest_of(b.t().contiguous()), digest_of(b), {}));
  CHECK(compare_digests(digest_of(b.roll(1, 0)), digest_of(b), {}));
  CHECK(compare_digests(digest_of(b.view({32, 128})), digest_of(b), {}));
  CHECK(compare_digests(digest_of(with(b, 5, std::nan(""))), digest_of(b), {}));
  CHECK_FALSE(
    compare_digests(digest_of(b.t().contiguous().t()), digest_of(b), {}));
}

TEST_CASE("A digest of few elements is the tensor itself",
          "[runtime][verify]") {
  auto b = torch::arange(10, torch::kFloat);
  auto x = compare_digests(digest_of(with(b, 3, 3.01)), digest_of(b), {});
  REQUIRE(x);
  CHECK(x->place == "element 3");
  CHECK(x->reference == "3");
}

TEST_CASE("A digest draws no random numbers", "[runtime][verify]") {
  torch::manual_seed(3);
  auto expected = torch::rand({4});
  torch::manual_seed(3);
  digest_of(torch::ones({1000}));
  CHECK(torch::equal(torch::rand({4}), expected));
}

TEST_CASE("The log of a step comes back from its bytes", "[runtime][verify]") {
  observed_step x;
  logged_call c;
  c.module = "a.b";
  c.microbatch = 3;
  c.number = 1;
  c.arguments = {std::nullopt, digest_of(torch::ones({2, 3}))};
  c.results = {digest_of(torch::zeros({300}))};
  c.gradients.push_back({1, 0, digest_of(torch::ones({1}))});
  x.calls.push_back(c);
  logged_pass p;
  p.microbatch = 2;
  p.inputs = {digest_of(torch::arange(5))};
  p.loss = digest_of(torch::tensor(2.5));
  p.seeds = {digest_of(torch::tensor(0.5))};
  x.passes.push_back(p);
  auto y = from_payload<observed_step>(to_payload(x), "record of a step");
  REQUIRE(y.calls.size() == 1);
  CHECK(y.calls[0].module == "a.b");
  CHECK(y.calls[0].microbatch == 3);
  CHECK(y.calls[0].number == 1);
  CHECK((y.calls[0].arguments == c.arguments));
  CHECK((y.calls[0].results == c.results));
  CHECK((y.calls[0].gradients.at(0).value == c.gradients[0].value));
  REQUIRE(y.passes.size() == 1);
  CHECK((y.passes[0].inputs == p.inputs));
  CHECK((y.passes[0].loss == p.loss));
  CHECK((y.passes[0].seeds == p.seeds));
}

// -- which module is named ----------------------------------------------------

namespace {

/// A chain a, b(b1, b2), c of one microbatch, and what may be changed in it.
struct chain {
  chain() {
    auto call = [this](const char* name, uint64_t begun, uint64_t ended,
                       double in, double out, uint64_t backward) {
      logged_call c;
      c.module = name;
      c.begun = begun;
      c.ended = ended;
      c.arguments = {digest_of(torch::tensor(in))};
      c.results = {digest_of(torch::tensor(out))};
      c.gradients = {{0, backward, digest_of(torch::tensor(out * 10))}};
      pipeline.log.calls.push_back(c);
    };
    call("a", 0, 1, 1, 2, 3);
    call("b", 2, 7, 2, 4, 1);
    call("b.b1", 3, 4, 2, 3, 2);
    call("b.b2", 5, 6, 3, 4, 1);
    call("c", 8, 9, 4, 5, 0);
    pipeline.log.calls[2].outer = pipeline.log.calls[3].outer = 1;
    logged_pass p;
    p.inputs = {digest_of(torch::tensor(1.0))};
    p.loss = digest_of(torch::tensor(5.0));
    p.seeds = {digest_of(torch::tensor(1.0))};
    pipeline.log.passes = {p};
    for (auto name : {"a", "b.b1", "b.b2", "c"}) {
      auto weight = std::string{name} + ".weight";
      names.push_back({{weight}, false});
      pipeline.gradients[weight] = torch::ones({2});
      pipeline.parameters[weight] = torch::ones({2});
      before[weight] = torch::zeros({2});
    }
    pipeline.loss = 5;
    reference = pipeline;
    for (auto& [name, x] : reference.gradients)
      x = x.clone();
  }

  logged_call& call(const std::string& name) {
    for (auto& c : pipeline.log.calls)
      if (c.module == name)
        return c;
    throw std::invalid_argument{name};
  }

  finding first() {
    verify_summary result;
    compare_step({.step = 1,
                  .microbatches = 1,
                  .root_rank = 0,
                  .names = names,
                  .pipeline = pipeline,
                  .reference = reference,
                  .before = before,
                  .allowed = {}},
                 result);
    REQUIRE_FALSE(result.equal());
    return result.findings.front();
  }

  std::vector<tensor_names> names;
  std::map<std::string, Tensor> before;
  step_evidence pipeline, reference;
};

void change(tensor_digest& x) {
  x = digest_of(torch::tensor(99.0));
}

} // namespace

TEST_CASE_METHOD(chain, "Equal logs have no findings", "[runtime][verify]") {
  verify_summary result;
  compare_step({.step = 1,
                .microbatches = 1,
                .root_rank = 0,
                .names = names,
                .pipeline = pipeline,
                .reference = reference,
                .before = before,
                .allowed = {}},
               result);
  CHECK(result.equal());
  CHECK(result.calls == 5);
  CHECK(result.modules == 5);
  CHECK(result.results == 5);
  CHECK(result.result_gradients == 5);
  CHECK(result.gradients.compared == 4);
}

TEST_CASE_METHOD(chain, "The innermost first wrong result names its module",
                 "[runtime][verify]") {
  for (auto name : {"b.b2", "b", "c"})
    change(*call(name).results[0]);
  auto x = first();
  CHECK(x.kind == finding_kind::result);
  CHECK(x.module == "b.b2");
  CHECK(x.values.pipeline == "99");
  CHECK(x.values.reference == "4");
}

TEST_CASE_METHOD(chain, "Code between the calls is that of the module around",
                 "[runtime][verify]") {
  for (auto name : {"b", "c"})
    change(*call(name).results[0]);
  CHECK(first().module == "b");
}

TEST_CASE_METHOD(chain, "A wrong argument names the module that got it",
                 "[runtime][verify]") {
  // All that b gets comes from rank 0.
  for (auto name : {"b", "b.b1", "b.b2"})
    call(name).rank = 1;
  change(*call("b").arguments[0]);
  for (auto name : {"b.b1", "b.b2", "b", "c"})
    change(*call(name).results[0]);
  auto x = first();
  CHECK(x.kind == finding_kind::argument);
  CHECK(x.module == "b");
}

TEST_CASE_METHOD(chain, "A wrong argument of the same rank names the caller",
                 "[runtime][verify]") {
  change(*call("b.b2").arguments[0]);
  change(*call("b.b2").results[0]);
  auto x = first();
  CHECK(x.kind == finding_kind::argument);
  CHECK(x.module == "b");
  CHECK_THAT(x.what, ContainsSubstring("'b.b2'"));
}

TEST_CASE_METHOD(chain, "A call that is missing names the outermost module",
                 "[runtime][verify]") {
  auto& calls = pipeline.log.calls;
  std::erase_if(calls, [](auto& c) { return c.module[0] == 'b'; });
  change(*call("c").arguments[0]);
  change(*call("c").results[0]);
  auto x = first();
  CHECK(x.kind == finding_kind::calls);
  CHECK(x.module == "b");
  CHECK(x.values.pipeline == "0");
  CHECK(x.values.reference == "1");
}

TEST_CASE_METHOD(chain, "A call too many is found before what it spoils",
                 "[runtime][verify]") {
  auto again = call("a");
  again.number = 1;
  pipeline.log.calls.push_back(again);
  change(*call("b").arguments[0]);
  auto x = first();
  CHECK(x.kind == finding_kind::calls);
  CHECK(x.module == "a");
  CHECK(x.values.pipeline == "2");
}

TEST_CASE_METHOD(chain, "A lost microbatch and a lost backward are found",
                 "[runtime][verify]") {
  SECTION("forward") {
    pipeline.log.passes.clear();
    auto x = first();
    CHECK(x.kind == finding_kind::microbatch);
    CHECK(x.module == "a");
  }
  SECTION("forward twice") {
    pipeline.log.passes.push_back(pipeline.log.passes[0]);
    CHECK(first().kind == finding_kind::microbatch);
  }
  SECTION("other data") {
    change(pipeline.log.passes[0].inputs[0]);
    CHECK(first().kind == finding_kind::microbatch);
  }
  SECTION("backward") {
    pipeline.log.passes[0].seeds.clear();
    auto x = first();
    CHECK(x.kind == finding_kind::seed);
    CHECK(x.module == "c");
  }
}

TEST_CASE_METHOD(chain, "Backward names what is nearest to the loss",
                 "[runtime][verify]") {
  SECTION("of results") {
    change(call("a").gradients[0].value);
    change(call("b.b1").gradients[0].value);
    auto x = first();
    CHECK(x.kind == finding_kind::result_gradient);
    CHECK(x.module == "b.b1");
  }
  SECTION("of parameters") {
    pipeline.gradients["a.weight"] = torch::zeros({2});
    pipeline.gradients["b.b2.weight"] = torch::zeros({2});
    auto x = first();
    CHECK(x.kind == finding_kind::gradient);
    CHECK(x.module == "b.b2");
    CHECK(x.tensor == "b.b2.weight");
  }
  SECTION("of both") {
    change(call("a").gradients[0].value);
    pipeline.gradients["b.b1.weight"] = torch::zeros({2});
    CHECK(first().module == "b.b1");
    change(call("b.b1").gradients[0].value);
    CHECK(first().kind == finding_kind::result_gradient);
  }
  SECTION("a gradient that is missing") {
    pipeline.gradients.erase("b.b1.weight");
    CHECK(first().tensor == "b.b1.weight");
  }
  SECTION("a tied parameter") {
    names[0].all = {"a.weight", "c.weight"};
    pipeline.gradients["a.weight"] = torch::zeros({2});
    CHECK(first().module == "c");
  }
}

TEST_CASE_METHOD(chain, "A wrong update, norm or loss is found",
                 "[runtime][verify]") {
  SECTION("update") {
    pipeline.parameters["c.weight"] = torch::full({2}, 1.001f);
    auto x = first();
    CHECK(x.kind == finding_kind::update);
    CHECK(x.tensor == "c.weight");
  }
  SECTION("norm") {
    pipeline.gradient_norm = 1;
    CHECK(first().kind == finding_kind::norm);
  }
  SECTION("loss of a microbatch") {
    change(pipeline.log.passes[0].loss);
    CHECK(first().kind == finding_kind::loss);
  }
  SECTION("mean") {
    pipeline.loss = 4;
    CHECK(first().kind == finding_kind::loss);
  }
}

TEST_CASE("A finding reads well", "[runtime][verify]") {
  finding x;
  x.kind = finding_kind::result;
  x.step = 2;
  x.module = "h.3";
  x.microbatch = 1;
  x.call = 1;
  x.rank = 1;
  x.what = "result 0";
  x.values = {"element 7", "1.5", "1.25", 0.25, 1e-5};
  CHECK(to_text(x)
        == "step 2, microbatch 1, module 'h.3', call 2, rank 1: result 0, "
           "element 7: 1.5 instead of 1.25 (off by 0.25, allowed 1e-05)");
  verify_summary all;
  all.steps = 2;
  CHECK(nlohmann::json::parse(to_json(all))["first"].is_null());
  CHECK(nlohmann::json::parse(to_json(all))["equal"] == true);
  x.values.difference = infinity;
  all.add(x);
  auto json = nlohmann::json::parse(to_json(all));
  CHECK(json["equal"] == false);
  CHECK(json["first"]["module"] == "h.3");
  CHECK(json["first"]["kind"] == "result");
  CHECK(json["first"]["difference"].is_null());
  CHECK_THAT(to_text(all), ContainsSubstring("different: 1 difference in 2"));
  all.steps = 9;
  all.recorded = 5;
  all.replayed = 3;
  all.fell_back = 1;
  CHECK_THAT(to_text(all),
             ContainsSubstring("in 9 steps (5 recorded, 3 replayed, 1 diverged "
                               "from the record); the first"));
}

TEST_CASE("As many steps are verified as replay takes", "[runtime][verify]") {
  train_config config;
  auto& x = config.smp;
  CHECK(steps_to_verify(config) == 3);
  x.static_mode = true;
  CHECK(steps_to_verify(config) == 8);
  x.static_steps = 1;
  CHECK(steps_to_verify(config) == 4);
  x.fast_mode = true; // up to three steps learn first
  CHECK(steps_to_verify(config) == 7);
  x.deterministic_server = true;
  CHECK(steps_to_verify(config) == 4);
  config = {};
  config.smp.static_mode = true;
  config.model.type = "torchscript"; // is compiled first
  CHECK(steps_to_verify(config) == 11);
}

// -- no false alarm -----------------------------------------------------------

namespace {

std::vector<test::verify_case> right_cases() {
  std::vector<test::verify_case> result;
  for (uint64_t ranks : {1, 2, 4})
    for (auto pipeline : {"simple", "interleaved"})
      for (uint64_t microbatches : {1, 4}) {
        auto x = test::gpt_case(ranks, pipeline, microbatches);
        // Each in another way.
        auto i = result.size();
        const char* optimizers[] = {"adamw", "sgd", "adam", "adagrad"};
        x.config.optimizer.type = optimizers[i % 4];
        x.config.model.tied = i % 2 == 1;
        x.config.model.dropout = i % 3 == 0 ? 0.2 : 0.0;
        if (i % 5 < 2)
          x.config.optimizer.clip_grad_norm = 0.1;
        if (i % 4 == 1)
          x.config.optimizer.momentum = 0.9;
        if (i % 3 == 1)
          x.config.optimizer.schedule = {.type = "cosine", .warmup_steps = 2};
        result.push_back(x);
      }
  for (auto model : {"norm", "remote", "dropout", "reuse", "branch", "frozen",
                     "unused", "towers"}) {
    auto i = result.size();
    result.push_back(test::model_case(model, 2, "interleaved", 4));
    result.push_back(
      test::model_case(model, 4, i % 4 == 0 ? "simple" : "interleaved", 2));
    if (i % 4 == 0)
      result.back().config.optimizer.type = "sgd";
  }
  for (auto model : {"norm", "dropout"})
    result.push_back(test::model_case(model, 1, "simple", 2));
  return result;
}

} // namespace

TEST_CASE("Right configurations give no false alarm", "[runtime][verify]") {
  auto cases = right_cases();
  REQUIRE(cases.size() == 30);
  for (auto& x : cases) {
    INFO(x.name);
    auto summary = test::run_case(x);
    CHECK(to_text(summary).starts_with("equal: 2 steps"));
    // Nothing was left out.
    auto m = x.config.smp.microbatches;
    CHECK(summary.steps == 2);
    CHECK(summary.losses.compared == 2 * m);
    CHECK(summary.calls >= 2 * m);
    CHECK(summary.results >= summary.calls);
    CHECK(summary.gradients.compared > 0);
    CHECK(summary.updates.compared >= summary.gradients.compared);
    CHECK(summary.owned > 0);
  }
}

namespace {

/// Notes that somebody wants its content.
struct noting_source final : promise_source {
  std::vector<int64_t> sizes() override {
    return {2};
  }

  completion_ptr content() override {
    wanted = true;
    auto result = std::make_shared<completion>();
    result->set();
    return result;
  }

  Tensor take() override {
    return torch::ones({2});
  }

  wait_reason why() const override {
    return {"a promise", {}};
  }

  bool wanted = false;
};

} // namespace

// To look at a promise is to wait for it, which nobody may do under the lock
// that other microbatches want.
TEST_CASE("Calls are logged without waiting for promises",
          "[runtime][verify]") {
  auto source = std::make_shared<noting_source>();
  std::vector<Tensor> tensors{make_promise(source, torch::kFloat),
                              torch::ones({2})};
  call_logger logger;
  logger.begin(&logger, tensors);
  logger.end(&logger, tensors);
  CHECK_FALSE(source->wanted);
  auto step = logger.take([](const void*) { return "module"; });
  REQUIRE(step.calls.size() == 1);
  auto& call = step.calls.front();
  REQUIRE(call.arguments.size() == 2);
  CHECK_FALSE(call.arguments.front().has_value());
  CHECK(call.arguments.back().has_value());
  CHECK_FALSE(call.results.front().has_value());
  CHECK(call.results.back().has_value());
}

TEST_CASE("A run with promises equals one process", "[runtime][verify]") {
  for (uint64_t ranks : {2, 4}) {
    auto x = test::gpt_case(ranks, "interleaved", 4);
    x.config.smp.fast_mode = true;
    INFO(x.name);
    CHECK(to_text(test::run_case(x, 3)).starts_with("equal: 3 steps"));
  }
}

TEST_CASE("Buffers are compared", "[runtime][verify]") {
  auto summary = test::run_case(test::model_case("norm", 2, "interleaved", 4),
                                3);
  // Two batch norms of three buffers each.
  CHECK(summary.buffers.compared == 3 * 6);
  CHECK(summary.equal());
}

namespace {

namespace ag = torch::autograd;

/// Looks like a part of the pipeline.
struct smp_node : ag::Node {
  std::string name() const override {
    return "smp::remote_call(fc)";
  }

  ag::variable_list apply(ag::variable_list&& grads) override {
    return std::move(grads);
  }
};

Tensor behind_smp_node(const Tensor& x) {
  auto result = x.variable_data();
  auto node = std::shared_ptr<ag::Node>(new smp_node, ag::deleteNode);
  node->set_next_edges({ag::impl::gradient_edge(x)});
  auto nr = node->add_input_metadata(result);
  ag::impl::set_gradient_edge(result, {node, nr});
  return result;
}

} // namespace

TEST_CASE("A reference that goes through the pipeline is refused",
          "[runtime][verify]") {
  auto x = test::model_case("dropout", 1, "simple", 1);
  x.job.make_model = [] {
    torch::manual_seed(1);
    torch::nn::Linear fc(8, 8);
    return std::make_unique<nn_trainable>(
      fc.ptr(), [fc](const batch& inputs) mutable {
        return behind_smp_node(fc(inputs.at(0)).sum());
      });
  };
  CHECK_THROWS_WITH(test::run_case(x),
                    ContainsSubstring("went through smp::remote_call"));
}
