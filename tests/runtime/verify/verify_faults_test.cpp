// ctest: seconds=11
#include "tests/support/catch.hpp"

#include "runtime/step/schedule_policies.hpp"
#include "runtime/verify/findings.hpp"
#include "tests/support/runs/child_process.hpp"
#include "tests/support/runs/program.hpp"
#include "tests/support/torch/verify_jobs.hpp"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cstdlib>
#include <string>
#include <utility>

using namespace smp;
using namespace smp::test;

// Each fault is seeded into a pipeline that is right otherwise: the hidden test
// case below runs a comparison in a process that preloads what seeds faults.

namespace {

constexpr const char* hidden = "A comparison that another process asked for";

struct seeded_fault {
  const char* name;
  const char* job; // "gpt" or a model of torch_verify_jobs
  const char* kind;
  const char* module;
  const char* tensor = "";
};

// The GPT's layers h.0 and h.1 are on rank 1.
const std::vector<seeded_fault> faults = {
  {"dropped-layer", "gpt", "calls", "transformer.h.1"},
  {"transposed-argument", "gpt", "argument", "transformer.h.0"},
  // Dropout of the attention is code of its own.
  {"wrong-random-stream", "gpt dropout", "argument", "transformer.h.0.attn"},
  {"lost-microbatch", "gpt", "microbatch", "transformer"},
  {"lost-backward", "gpt", "seed", "lm_head"},
  {"wrong-loss-scale", "gpt", "seed", "lm_head"},
  {"untied-weight", "gpt tied", "owner", "lm_head", "lm_head.weight"},
  {"doubled-reduction", "remote", "gradient", "", "weight"},
  {"doubled-norm", "gpt clip", "norm", ""},
  {"stale-buffer", "norm", "buffer", "norm", "norm.running_mean"},
  {"summed-replicas", "gpt replicas", "gradient", "lm_head"},
  {"lone-replica", "gpt replicas", "gradient", "lm_head"},
  {"shared-batch", "gpt replicas", "microbatch", "transformer"},
};

verify_case case_of(const std::string& job) {
  if (!job.starts_with("gpt"))
    return model_case(job, 2, "interleaved", 4);
  auto result = gpt_case(2, "interleaved", 4);
  // Where the layers are must depend neither on times nor on cleverness.
  result.config.smp.strategy = "paper";
  result.config.smp.trace_device = "none";
  result.config.model.tied = job == "gpt tied";
  result.config.smp.ddp = job == "gpt replicas";
  if (result.config.smp.ddp)
    result.config.ranks = 4;
  if (job == "gpt dropout")
    result.config.model.dropout = 0.2;
  if (job == "gpt clip")
    result.config.optimizer.clip_grad_norm = 0.1;
  return result;
}

/// @returns the result of a comparison in a process of its own
nlohmann::json compare(const std::string& job, const std::string& fault,
                       bool preload = true, uint64_t steps = 2) {
  auto library = built_program("../lib/smp_faults.so");
  child_process child{hidden,
                      {{"SMP_FAULT", fault},
                       {"SMP_VERIFY_JOB", job},
                       {"SMP_VERIFY_STEPS", std::to_string(steps)},
                       {"LD_PRELOAD", preload ? library : ""}}};
  auto answer = child.hear(std::chrono::seconds{100});
  REQUIRE(answer);
  CHECK(child.join() == 0);
  return nlohmann::json::parse(*answer);
}

} // namespace

TEST_CASE("A comparison that another process asked for", "[.]") {
  parent_process parent;
  auto job = case_of(std::getenv("SMP_VERIFY_JOB"));
  // By default callers go on, in the second step at each call.
  REQUIRE(takes_promises(job.config.smp));
  auto result = run_case(job, std::stoull(std::getenv("SMP_VERIFY_STEPS")));
  // A packet does not hold everything.
  result.findings.resize(std::min<size_t>(result.findings.size(), 1));
  parent.tell(to_json(result));
}

TEST_CASE("Every seeded fault is found and its module named",
          "[runtime][verify]") {
  for (auto& x : faults) {
    INFO(x.name);
    auto result = compare(x.job, x.name);
    CHECK(result["equal"] == false);
    auto& first = result["first"];
    INFO(first.dump(2));
    REQUIRE(first.is_object());
    CHECK(first["kind"] == x.kind);
    CHECK(first["module"] == x.module);
    if (*x.tensor != '\0')
      CHECK(first["tensor"] == x.tensor);
    // Both values are told.
    CHECK(first["pipeline"] != first["reference"]);
  }
}

TEST_CASE("A fault is found in calls that nobody waits for as well",
          "[runtime][verify][fast]") {
  for (auto name :
       {"transposed-argument", "wrong-random-stream", "doubled-reduction"}) {
    INFO(name);
    auto& x = *std::ranges::find(faults, std::string{name},
                                 [](auto& y) { return std::string{y.name}; });
    // The first call of a kind waits; none does in the second step.
    auto first = compare(x.job, x.name, true, 1)["differences"].get<int>();
    auto both = compare(x.job, x.name, true, 2)["differences"].get<int>();
    CHECK(first > 0);
    CHECK(both > first);
  }
}

TEST_CASE("What seeds faults is right without one", "[runtime][verify]") {
  for (auto job : {"gpt tied", "gpt replicas", "norm", "remote"})
    CHECK(compare(job, "")["equal"] == true);
}

TEST_CASE("No fault happens to users, whatever their environment says",
          "[runtime][verify]") {
  // The name of the variable is nowhere but in the library of the tests.
  for (auto [path, there] : {std::pair{"../lib/smp_faults.so", true},
                             {"../lib/libsmp.so", false},
                             {"smp-train", false}}) {
    INFO(path);
    auto found = content_of(built_program(path)).find("SMP_FAULT");
    CHECK((found != std::string::npos) == there);
  }
  CHECK(compare("gpt", "dropped-layer", false)["equal"] == true);
}
