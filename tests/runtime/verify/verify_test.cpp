// ctest: seconds=41
#include "tests/support/catch.hpp"

#include "runtime/lazy/promise.hpp"
#include "runtime/train/trainable.hpp"
#include "runtime/verify/call_log.hpp"
#include "runtime/verify/step_comparison.hpp"
#include "runtime/verify/verify.hpp"
#include "tests/support/error_of.hpp"
#include "tests/support/torch/verify_jobs.hpp"

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
  p.results = {digest_of(torch::tensor(2.5))};
  p.seeds = {digest_of(torch::tensor(0.5))};
  x.passes.push_back(p);
  auto y = from_payload<observed_step>(to_payload(x), "numbers of a step");
  REQUIRE(y.calls.size() == 1);
  CHECK(y.calls[0].module == "a.b");
  CHECK(y.calls[0].microbatch == 3);
  CHECK(y.calls[0].number == 1);
  CHECK((y.calls[0].arguments == c.arguments));
  CHECK((y.calls[0].results == c.results));
  CHECK((y.calls[0].gradients.at(0).value == c.gradients[0].value));
  REQUIRE(y.passes.size() == 1);
  CHECK((y.passes[0].inputs == p.inputs));
  CHECK((y.passes[0].results == p.results));
  CHECK((y.passes[0].seeds == p.seeds));
}

TEST_CASE("A log with a digest of no tensor names who sent it",
          "[runtime][verify]") {
  observed_step x;
  auto& p = x.passes.emplace_back();
  p.results.emplace_back();
  auto read = [&](std::vector<int64_t> sizes, size_t pieces) {
    p.results[0].sizes = std::move(sizes);
    p.results[0].sums.assign(pieces, 0);
    p.results[0].samples.assign(pieces, 0);
    return test::error_of(
      [&] {
        from_payload<observed_step>(to_payload(x), "numbers", rank_id{3});
      },
      error_code::protocol);
  };
  CHECK(read({}, 1) == "no error");
  CHECK(read({0, 7}, 0) == "no error");
  CHECK(read({257}, 129) == "no error"); // pieces of two elements
  CHECK_THAT(
    read({257}, 128),
    ContainsSubstring("rank 3: malformed numbers: passes.results.samples")
      && ContainsSubstring("no such value"));
  auto most = std::numeric_limits<int64_t>::max();
  CHECK(read({257}, 0) != "no error");
  CHECK(read({-1}, 1) != "no error");
  CHECK(read({most}, 256) != "no error");
  CHECK(read({most, 2}, 256) != "no error");
}

TEST_CASE("As many steps are verified as replay takes", "[runtime][verify]") {
  train_config config;
  auto& x = config.smp;
  CHECK(steps_to_verify(config) == 3);
  x.static_mode = true; // up to four steps do not count
  CHECK(steps_to_verify(config) == 12);
  x.static_steps = 1;
  CHECK(steps_to_verify(config) == 8);
  x.static_steps = 5;
  x.deterministic_server = true; // records one
  CHECK(steps_to_verify(config) == 8);
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
  for (auto model : {"norm", "dropout", "long"})
    result.push_back(test::model_case(model, 1, "simple", 2));
  return result;
}

} // namespace

TEST_CASE("Right configurations give no false alarm", "[runtime][verify]") {
  auto cases = right_cases();
  REQUIRE(cases.size() == 31);
  for (auto& x : cases) {
    INFO(x.name);
    auto summary = test::run_case(x);
    CHECK_THAT(to_text(summary), Catch::Matchers::StartsWith("equal: 2 steps"));
    // Nothing was left out.
    auto m = x.config.smp.microbatches;
    CHECK(summary.steps == 2);
    CHECK(summary.losses.compared == 2 * m);
    CHECK(summary.calls >= 2 * m);
    CHECK(summary.results >= summary.calls);
    CHECK(summary.result_gradients > 0);
    CHECK(summary.gradients.compared > 0);
    CHECK(summary.updates.compared >= summary.gradients.compared);
    CHECK(summary.owned > 0);
  }
}

TEST_CASE("Scripted models that draw random numbers give no false alarm",
          "[runtime][verify][script][R23]") {
  // Five steps: TorchScript optimises what ran once or twice.
  for (auto model : {"drop_path", "dropout", "hf_llama"})
    for (uint64_t ranks : {1, 2, 4})
      for (uint64_t microbatches : {1, 4}) {
        auto x = test::script_case(model, ranks, microbatches);
        INFO(x.name);
        auto summary = test::run_case(x, 5, ranks > 1);
        CHECK_THAT(to_text(summary),
                   Catch::Matchers::StartsWith("equal: 5 steps"));
        CHECK(summary.result_gradients > 0);
        CHECK((summary.requests > 0) == (ranks > 1));
      }
}

TEST_CASE("A comparison of what stays on one rank says so",
          "[runtime][verify]") {
  auto x = test::gpt_case(2, "interleaved", 2);
  x.config.smp.auto_partition = false;
  auto together = test::run_case(x);
  CHECK(together.equal());
  CHECK(together.requests == 0);
  CHECK_THAT(
    to_text(together),
    ContainsSubstring("nothing that crosses ranks was compared (--split "
                      "places modules on all of them)"));
  auto apart = test::run_case(x, 2, true);
  CHECK(apart.requests > 100);
  CHECK_THAT(to_text(apart), ContainsSubstring("equal: 2 steps")
                               && !ContainsSubstring("ranks"));
  auto alone = test::run_case(test::gpt_case(1, "simple", 1));
  CHECK_THAT(to_text(alone), ContainsSubstring("one rank: nothing was split"));
  CHECK(nlohmann::json::parse(to_json(apart))["requests"] == apart.requests);
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

TEST_CASE("Replicas equal one process that has the whole batch",
          "[runtime][verify][replicas]") {
  auto compare = [](test::verify_case x, uint64_t replicas) {
    x.config.smp.ddp = true;
    x.config.ranks = x.config.smp.pipeline_parallel_degree * replicas;
    INFO(x.name << ", " << replicas << " replicas");
    auto summary = test::run_case(x, 3);
    CHECK_THAT(to_text(summary), Catch::Matchers::StartsWith("equal: 3 steps"));
    CHECK(summary.ranks == *x.config.ranks);
  };
  for (uint64_t ranks : {1, 2})
    for (uint64_t replicas : {2, 3}) {
      auto x = test::gpt_case(ranks, "interleaved", 4);
      x.config.model.dropout = 0.2;
      x.config.optimizer.clip_grad_norm = 0.1;
      if (ranks == 2 && replicas == 2)
        x.config.smp.placement_strategy = "spread";
      compare(x, replicas);
    }
  // Batch norms of replicas see other samples; each has its own.
  for (auto model : {"norm", "remote", "branch", "frozen", "unused"})
    compare(test::model_case(model, 2, "interleaved", 2), 2);
}

TEST_CASE("Models that tensor-parallel ranks share equal one process",
          "[runtime][verify][tensor_parallel]") {
  auto compare = [](test::verify_case x, uint64_t tensor, uint64_t replicas) {
    x.config.smp.ddp = true;
    x.config.smp.tensor_parallel_degree = tensor;
    x.config.smp.tensor_parallel_modules = {"*"};
    x.config.ranks = x.config.smp.pipeline_parallel_degree * tensor * replicas;
    INFO(x.name << ", " << tensor << " share, " << replicas << " replicas");
    auto summary = test::run_case(x, 5);
    // What ranks share crosses them, whatever else does.
    CHECK_THAT(to_text(summary), Catch::Matchers::StartsWith("equal: 5 steps")
                                   && !ContainsSubstring("crosses ranks"));
  };
  for (uint64_t ranks : {1, 2}) {
    auto x = test::gpt_case(ranks, "interleaved", 2);
    x.config.model.dropout = 0.2;
    x.config.optimizer.clip_grad_norm = 0.1;
    x.config.smp.trace_device = ranks == 1 ? "none" : "cpu";
    compare(x, 2, 1);
    x.config.model.tied = true;
    x.config.optimizer.type = "adagrad"; // its state is made early
    compare(x, 2, 2);
  }
  for (auto model : {"remote", "frozen", "towers", "reuse"})
    compare(test::model_case(model, 2, "interleaved", 2), 2, 1);
  // Exports of Python, as they are.
  for (auto model : {"hf_bert", "hf_gpt2", "hf_llama", "dropout"})
    compare(test::script_case(model, 2, 2), 2, 1);
}

TEST_CASE("Transformer layers that ranks share as a whole equal one process",
          "[runtime][verify][tensor_parallel][R54]") {
  auto compare = [](test::verify_case x, const std::string& optimize,
                    const std::string& modules, uint64_t tensor,
                    uint64_t replicas) {
    x.config.smp.ddp = true;
    x.config.smp.optimize = optimize;
    x.config.smp.tensor_parallel_degree = tensor;
    x.config.smp.tensor_parallel_modules = {modules};
    x.config.ranks = x.config.smp.pipeline_parallel_degree * tensor * replicas;
    INFO(x.name << " for " << optimize << ", " << tensor << " share, "
                << replicas << " replicas");
    auto summary = test::run_case(x, 5);
    CHECK_THAT(to_text(summary), Catch::Matchers::StartsWith("equal: 5 steps"));
  };
  for (std::string optimize : {"speed", "memory"}) {
    for (uint64_t ranks : {1, 2}) {
      auto x = test::gpt_case(ranks, "interleaved", 2);
      x.config.model.dropout = 0.2;
      x.config.optimizer.clip_grad_norm = 0.1;
      compare(x, optimize, "transformer.h.*", 2, 1);
      compare(x, optimize, "transformer.h.*", 2, 2);
    }
    auto four = test::gpt_case(1, "interleaved", 2);
    four.config.model.dropout = 0.2;
    four.config.model.heads = 4;
    compare(four, optimize, "transformer.h.*", 4, 1);
  }
}

TEST_CASE("What ranks share as a whole stays together in a split job",
          "[runtime][verify][tensor_parallel][R54]") {
  for (auto x : {test::gpt_case(2, "interleaved", 2),
                 test::script_case("hf_gpt2", 2, 2)}) {
    x.config.smp.ddp = true;
    x.config.smp.tensor_parallel_degree = 2;
    x.config.smp.tensor_parallel_modules = {"*"};
    x.config.ranks = 4;
    INFO(x.name);
    auto summary = test::run_case(x, 2, true);
    CHECK_THAT(to_text(summary), Catch::Matchers::StartsWith("equal: 2 steps"));
    CHECK(summary.requests > 0);
  }
}

TEST_CASE("Blocks of T5 that ranks share as a whole equal one process",
          "[runtime][verify][tensor_parallel][R54]") {
  auto compare = [](uint64_t pipeline, uint64_t tensor, uint64_t replicas,
                    const std::string& optimize, bool gated,
                    const std::string& again = "") {
    auto x = test::gpt_case(pipeline, "interleaved", 2);
    auto& model = x.config.model;
    model.type = "t5";
    model.layers = 2;
    model.decoder_layers = 3;
    model.heads = 4;
    model.dropout = 0.2;
    model.gated = gated;
    model.tied = !gated;
    x.config.smp.ddp = true;
    x.config.smp.optimize = optimize;
    x.config.smp.tensor_parallel_degree = tensor;
    x.config.smp.tensor_parallel_modules = {"encoder.block.*",
                                            "decoder.block.*"};
    if (!again.empty()) {
      x.config.smp.activation_checkpointing.modules = {"decoder.block"};
      x.config.smp.activation_checkpointing.strategy = again;
    }
    x.config.ranks = pipeline * tensor * replicas;
    INFO(pipeline << " pipeline ranks, " << tensor << " share for " << optimize
                  << ", " << replicas << " replicas, gated: " << gated
                  << ", computed again: " << again);
    auto text = to_text(test::run_case(x, 5));
    INFO(text);
    CHECK(text.starts_with("equal: 5 steps"));
  };
  for (std::string optimize : {"speed", "memory"}) {
    compare(1, 2, 1, optimize, false);
    compare(1, 4, 1, optimize, true);
    compare(1, 2, 2, optimize, true);
    compare(2, 2, 1, optimize, true);
    compare(2, 2, 2, optimize, false);
    compare(1, 2, 1, optimize, true, "each");
  }
  // For memory, sums of position biases round a little beyond the bound.
  compare(1, 2, 1, "speed", true, "contiguous");
}

TEST_CASE("What backward computes again equals one process that keeps it",
          "[runtime][verify][R52]") {
  auto compare = [](test::verify_case x, const std::string& modules,
                    const std::string& strategy = "each") {
    x.config.smp.activation_checkpointing = {{modules}, strategy};
    INFO(x.name << ", " << modules << ", " << strategy);
    auto summary = test::run_case(x, 3);
    CHECK_THAT(to_text(summary), Catch::Matchers::StartsWith("equal: 3 steps"));
  };
  for (uint64_t ranks : {1, 2}) {
    auto x = test::gpt_case(ranks, "interleaved", 4);
    x.config.model.dropout = 0.2;
    x.config.optimizer.clip_grad_norm = 0.1;
    compare(x, "transformer.h", "group_2");
    x.config.smp.pipeline = "1f1b";
    x.config.smp.deterministic_server = true;
    x.config.train.dtype = "bfloat16";
    compare(x, "*");
  }
  // Peers exchange again what they exchanged.
  auto x = test::gpt_case(2, "interleaved", 2);
  x.config.model.dropout = 0.2;
  x.config.model.tied = true;
  x.config.smp.ddp = true;
  x.config.smp.tensor_parallel_degree = 2;
  x.config.smp.tensor_parallel_modules = {"*"};
  x.config.ranks = 4;
  compare(x, "transformer.h.*");
  compare(x, "*");
  for (auto model : {"norm", "remote", "branch", "frozen", "unused", "towers",
                     "reuse", "dropout"})
    compare(test::model_case(model, 2, "interleaved", 2), "*");
  for (auto model : {"hf_gpt2", "dropout"})
    compare(test::script_case(model, 2, 2), "*");
}

TEST_CASE("What was in a file meanwhile equals one process",
          "[runtime][verify][R57]") {
  for (uint64_t ranks : {1, 2}) {
    auto x = test::gpt_case(ranks, "interleaved", 4);
    x.config.model.dropout = 0.2;
    x.config.model.width = 64;
    x.config.smp.activation_checkpointing.modules = {"transformer.h"};
    x.config.smp.offload_activations = true;
    x.config.smp.activation_loading_horizon = 1;
    INFO(ranks << " ranks");
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
