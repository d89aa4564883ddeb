#include "tests/support/catch.hpp"

#include "runtime/verify/step_comparison.hpp"

#include <nlohmann/json.hpp>
#include <torch/types.h>

#include <limits>
#include <map>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

using namespace smp;
using Catch::Matchers::ContainsSubstring;
using torch::Tensor;

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
      c.gradients = {{0, backward, digest_of(torch::tensor(out * 10)), begun}};
      // As if each event made a node of autograd.
      c.first_node = begun;
      c.end_node = ended;
      pipeline.log.calls.push_back(c);
    };
    call("a", 0, 1, 1, 2, 3);
    call("b", 2, 7, 2, 4, 1);
    call("b.b1", 3, 4, 2, 3, 2);
    call("b.b2", 5, 6, 3, 4, 1);
    call("c", 8, 9, 4, 5, 0);
    pipeline.log.calls[2].outer = pipeline.log.calls[3].outer = 1;
    // What b returns is the result of b.b2.
    pipeline.log.calls[1].gradients[0].node = 5;
    logged_pass p;
    p.inputs = {digest_of(torch::tensor(1.0))};
    p.results = {digest_of(torch::tensor(5.0))};
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

  verify_summary compared(bool casts_elsewhere = false) {
    verify_summary result;
    compare_step({.step = 1,
                  .microbatches = 1,
                  .root_rank = 0,
                  .names = names,
                  .pipeline = pipeline,
                  .reference = reference,
                  .before = before,
                  .allowed = {},
                  .casts_elsewhere = casts_elsewhere,
                  .inside = inside},
                 result);
    return result;
  }

  finding first() {
    auto result = compared();
    REQUIRE_FALSE(result.equal());
    return result.findings.front();
  }

  std::vector<tensor_names> names;
  std::map<std::string, Tensor> before;
  std::set<std::string> inside;
  step_evidence pipeline, reference;
};

void change(tensor_digest& x) {
  x = digest_of(torch::tensor(99.0));
}

} // namespace

TEST_CASE_METHOD(chain, "Equal logs have no findings", "[runtime][verify]") {
  auto result = compared();
  CHECK(result.equal());
  CHECK(result.calls == 5);
  CHECK(result.modules == 5);
  CHECK(result.results == 5);
  CHECK(result.result_gradients == 4); // one of b and b.b2
  CHECK(result.gradients.compared == 4);
}

TEST_CASE_METHOD(chain, "What passes may have another type where casts move",
                 "[runtime][verify]") {
  auto half = digest_of(torch::tensor(3.0).to(torch::kBFloat16));
  call("b.b1").results[0] = half;
  call("b.b2").arguments[0] = half;
  CHECK(first().kind == finding_kind::result);
  CHECK(first().module == "b.b1");
  CHECK(compared(true).equal());
  // Another number is still a difference.
  call("b.b1").results[0] = digest_of(torch::tensor(4.0).to(torch::kBFloat16));
  CHECK_FALSE(compared(true).equal());
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

TEST_CASE_METHOD(chain, "The gradient of a result counts where that was made",
                 "[runtime][verify]") {
  // If another rank ran b.b2, b misses what that did with its result.
  change(call("b").gradients[0].value);
  CHECK(compared().equal());
  // Ranks share b as a whole: nobody calls b.b2.
  inside = {"b.b1", "b.b2"};
  std::erase_if(pipeline.log.calls,
                [this](auto& c) { return inside.contains(c.module); });
  auto x = first();
  CHECK(x.kind == finding_kind::result_gradient);
  CHECK(x.module == "b");
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
    change(pipeline.log.passes[0].results[0]);
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

TEST_CASE("A finding about a name that is not UTF-8 is written, too",
          "[runtime][verify]") {
  finding x;
  x.module = "caf\xe9"; // Latin-1
  verify_summary all;
  all.add(x);
  auto json = nlohmann::json::parse(to_json(all));
  CHECK(json["first"]["module"] == "caf\xef\xbf\xbd");
  CHECK(json["differences"] == 1);
}

TEST_CASE("A loss of the held-out data beyond its bound is a finding",
          "[runtime][verify]") {
  verify_summary result;
  compare_held_out(2, 1.0, 1.0 + 9e-6, {}, result);
  auto nan = std::numeric_limits<double>::quiet_NaN();
  compare_held_out(2, nan, nan, {}, result);
  auto infinity = std::numeric_limits<double>::infinity();
  compare_held_out(2, infinity, infinity, {}, result);
  CHECK(result.equal());
  compare_held_out(2, 1.0, nan, {}, result);
  compare_held_out(2, 1.0, 1.0 + 2e-5, {}, result);
  REQUIRE(result.differences == 2);
  CHECK_THAT(to_text(result.findings[1]),
             ContainsSubstring("step 2")
               && ContainsSubstring("loss of the held-out data, in evaluation "
                                    "mode: 1 instead of 1.00002"));
  compare_held_out(2, 1.0, infinity, {}, result);
  CHECK(result.differences == 3);
}
