#include "tests/support/catch.hpp"

#include "runtime/plan/planner.hpp"
#include "runtime/step/model_state.hpp"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <string>
#include <vector>

// What `smp-train partition` says of modules that are shared or not, all of
// them by name, and what shared ones cost.

using namespace smp;
using Catch::Matchers::ContainsSubstring;

namespace {

train_config five_blocks() {
  train_config x;
  x.ranks = 2;
  x.smp.ddp = true;
  x.smp.tensor_parallel_degree = 2;
  x.smp.tensor_parallel_modules = {"transformer.h"};
  x.smp.microbatches = 2;
  x.smp.threads = 1;
  x.model.type = "gpt";
  x.model.layers = 5;
  x.model.heads = 2;
  x.model.width = 16;
  x.model.vocabulary = 32;
  x.data.type = "synthetic";
  x.data.sequence_length = 8;
  x.data.batch_size = 4;
  x.train.steps = 1;
  return x;
}

/// @returns the forward time of a module in seconds, without what it calls
double seconds_of(const partition_decision& x, const std::string& path) {
  auto found = std::ranges::find(x.model, path, &module_info::path);
  REQUIRE(found != x.model.end());
  REQUIRE(found->compute);
  return *found->compute;
}

const std::string not_named
  = "Embedding not shared, as it is not named; name it in "
    "tensor_parallel.modules";

} // namespace

TEST_CASE("a need is compared with what the control group may use",
          "[runtime][plan]") {
  std::vector<memory_need> needs{{.parameters = 300'000'000}};
  const activation_need unknown{.unknown = "they are not measured"};
  control_group here;
  auto config = five_blocks();
  auto text = [&] { return needs_text(needs, unknown, config, here); };
  CHECK_THAT(text(), !ContainsSubstring("warning"));
  here.memory = 600'000'000; // two ranks
  CHECK_THAT(text(), !ContainsSubstring("warning"));
  here.memory = 512'000'000;
  CHECK_THAT(text(),
             ContainsSubstring("warning: all ranks together need 600 MB")
               && ContainsSubstring("may use 512 MB"));
  // Devices have memory of their own.
  config.smp.device = "sim";
  CHECK_THAT(text(), !ContainsSubstring("warning"));
  needs[0].on_host = 260'000'000;
  CHECK_THAT(text(),
             ContainsSubstring("warning: all ranks together need 520 MB"));
}

TEST_CASE("all modules that are shared, part of another or not named are named",
          "[runtime][plan][tensor_parallel]") {
  auto plan = plan_model(five_blocks(), true);
  CHECK_THAT(plan.text,
             ContainsSubstring("\nTransformerLayer shared by 2 ranks for "
                               "memory: transformer.h.0, transformer.h.1, "
                               "transformer.h.2, transformer.h.3, "
                               "transformer.h.4\n")
               && ContainsSubstring("\nConv1D not shared for itself, as it is "
                                    "part of transformer.h.4, which is: "
                                    "transformer.h.4.attn.c_attn, "
                                    "transformer.h.4.attn.c_proj, "
                                    "transformer.h.4.mlp.c_fc, "
                                    "transformer.h.4.mlp.c_proj\n")
               && ContainsSubstring("\n" + not_named
                                    + ": transformer.wte, transformer.wpe\n"));
  auto json = nlohmann::json::parse(plan.json);
  std::vector<std::string> modules;
  for (auto& x : json.at("sharing"))
    if (x.at("remark") == not_named)
      modules = x.at("modules").get<std::vector<std::string>>();
  CHECK(modules
        == std::vector<std::string>{"transformer.wte", "transformer.wpe"});
}

TEST_CASE("where not all is wanted the first names are told",
          "[runtime][plan][tensor_parallel]") {
  CHECK_THAT(plan_model(five_blocks()).text,
             ContainsSubstring("for memory: transformer.h.0, transformer.h.1, "
                               "transformer.h.2 and 2 more\n")
               && !ContainsSubstring("not named")
               && !ContainsSubstring("not shared for itself"));
}

TEST_CASE("nothing is said of sharing where no ranks could share",
          "[runtime][plan][tensor_parallel]") {
  auto x = five_blocks();
  x.ranks = 1;
  x.smp.ddp = false;
  x.smp.tensor_parallel_degree = 1;
  x.smp.tensor_parallel_modules.clear();
  auto plan = plan_model(x, true);
  CHECK_THAT(plan.text, !ContainsSubstring("not shared"));
  CHECK_FALSE(nlohmann::json::parse(plan.json).contains("sharing"));
}

TEST_CASE("what ranks exchange for shared modules is in their costs",
          "[runtime][plan][tensor_parallel]") {
  auto x = five_blocks();
  x.model.width = 256; // some milliseconds, of which times count
  x.data.sequence_length = 64;
  x.data.batch_size = 8;
  std::vector<partition_decision> found;
  // From the same trace for one rank, and for two with samples of their own or
  // the same.
  decide_alone(x, [&](lone_decision& run) {
    sharing_request two{
      .patterns = {"transformer.h"}, .peers = 2, .saves_memory = false};
    found.push_back(run.state.decide(2, 0, {}));
    found.push_back(run.state.decide(2, 0, two));
    two.prescaled = true;
    found.push_back(run.state.decide(2, 0, two));
  });
  auto& alone = found.at(0);
  auto& own = found.at(1);
  auto& same = found.at(2);
  // Hidden states of 4 samples of 64 tokens. For speed each half of a layer
  // has an allgather and a reduce-scatter of them each way, or an allreduce of
  // which a rank sends half there and half back.
  const double states = 4 * 64 * 256 * sizeof(float);
  const double own_seconds = 8 * states / 5e9;
  const double same_seconds = 4 * states / 5e9;
  for (std::string name : {"transformer.h.0", "transformer.h.4"}) {
    auto before = seconds_of(alone, name);
    CHECK(seconds_of(own, name) - before == Catch::Approx(own_seconds / 3));
    CHECK(seconds_of(same, name) - before / 2
          == Catch::Approx(same_seconds / 3));
  }
  for (std::string name : {"transformer.wte", "transformer.h.0.mlp.c_fc"})
    CHECK(seconds_of(own, name) == seconds_of(alone, name));
  CHECK(own.plan.options.step_seconds - alone.plan.options.step_seconds
        == Catch::Approx(5 * own_seconds));
  CHECK_THAT(own.plan.options.basis,
             ContainsSubstring("; what ranks send for shared modules adds 2.1 "
                               "ms in both phases"));
  CHECK_THAT(alone.plan.options.basis, !ContainsSubstring("shared"));
}
