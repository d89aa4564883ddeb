// ctest: seconds=15 label=multiprocess

#include "tests/support/catch.hpp"

#include "tests/support/runs/train_dir.hpp"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

using Catch::Matchers::ContainsSubstring;
using namespace smp::test;

namespace {

constexpr const char* tiny = R"([smp]
pipeline_parallel_degree = 2
microbatches = 4

[model]
type = "gpt"
layers = 4
heads = 2
width = 16
dropout = 0.1
tied = true

[data]
type = "synthetic"
sequence_length = 16
batch_size = 8

[optimizer]
clip_grad_norm = 1.0

[train]
steps = 5
save_model = true
)";

struct tiny_job : train_dir {
  tiny_job() : train_dir(tiny) {
    // nop
  }

  /// smp-train verify with these arguments, in that directory.
  program start(std::vector<std::string> arguments,
                std::map<std::string, std::string> environment = {}) const {
    arguments.insert(arguments.begin(), "verify");
    return train_dir::start(std::move(arguments), std::move(environment));
  }

  std::string run(std::vector<std::string> arguments, int expected = 0) const {
    return start(std::move(arguments)).finish(expected);
  }

  static std::map<std::string, std::string> seeding(const std::string& fault) {
    return {{"SMP_FAULT", fault},
            {"LD_PRELOAD", built_program("../lib/smp_faults.so")}};
  }

  nlohmann::json result(const std::string& name) const {
    return nlohmann::json::parse(content_of(path / name));
  }
};

/// @param kind "processes" or "threads"
std::map<std::string, std::string> ranks_as(const std::string& kind) {
  if (kind == "threads")
    return threads_as_ranks;
  return {};
}

} // namespace

TEST_CASE_METHOD(tiny_job, "A right job is equal over processes and threads",
                 "[apps][verify]") {
  for (auto type : {"processes", "threads"}) {
    auto output = start({"tiny.toml", "--steps", "2", "--run-dir", type,
                         "--json", "out.json"},
                        ranks_as(type))
                    .finish();
    CHECK_THAT(output, ContainsSubstring("2 ranks against one process")
                         && ContainsSubstring("equal: 2 steps"));
    auto json = result("out.json");
    CHECK(json["equal"] == true);
    CHECK(json["steps"] == 2);
    CHECK(json["ranks"] == 2);
    CHECK(json["microbatches"] == 4);
    CHECK(json["first"].is_null());
    CHECK(json["losses"]["compared"] == 8);
    // 4 layers of 12, two tables, the last norm; the head is tied.
    CHECK(json["gradients"]["compared"] == 2 * (4 * 12 + 4));
    CHECK(json["owned"] == 4 * 12 + 4);
    // Nothing is trained for good.
    CHECK_FALSE(std::filesystem::exists(path / type / "model.safetensors"));
  }
}

TEST_CASE_METHOD(tiny_job, "Without --steps replay is verified, and counted",
                 "[apps][verify][R33]") {
  struct mode {
    std::vector<std::string> settings;
    int recorded; // besides steps that learn what calls return
    int replayed;
    int dynamic;
  };
  for (auto& [settings, recorded, replayed, dynamic] : std::vector<mode>{
         {{"--smp.static_mode=true", "--smp.static_steps=2"}, 2, 3, 0},
         {{"--smp.deterministic_server=true"}, 1, 3, 0},
         {{}, 0, 0, 3},
       })
    for (auto waits : {false, true}) {
      auto arguments = settings;
      arguments.insert(arguments.begin(), {"tiny.toml", "--json", "out.json"});
      if (waits)
        arguments.push_back("--smp.fast_mode=false");
      auto output = start(arguments, threads_as_ranks).finish();
      auto json = result("out.json");
      auto seen = json["recorded"].get<int>();
      if (waits || recorded == 0)
        CHECK(seen == recorded);
      else
        CHECK((seen > recorded && seen <= recorded + 3));
      CHECK(json["replayed"] == replayed);
      CHECK(json["dynamic"] == dynamic);
      CHECK(json["fell_back"] == 0);
      CHECK_THAT(
        output, ContainsSubstring(
                  recorded == 0
                    ? fmt::format("equal: {} steps, ", dynamic)
                    : fmt::format("equal: {} steps ({} recorded, 3 replayed), ",
                                  seen + replayed, seen)));
    }
}

TEST_CASE_METHOD(tiny_job, "Pipelines of replicas replay from other steps on",
                 "[apps][verify][R33]") {
  CHECK_THAT(run({"tiny.toml", "--ranks", "4", "--smp.ddp=true",
                  "--smp.static_mode=true", "--smp.static_steps=2"}),
             ContainsSubstring(" recorded, 3 replayed)"));
}

TEST_CASE_METHOD(tiny_job, "Each mode that is named is verified",
                 "[apps][verify]") {
  for (auto type : {"processes", "threads"}) {
    auto output = start({"tiny.toml", "--modes",
                         "fast,dynamic,deterministic+static", "--steps", "3",
                         "--json", "out.json", "--run-dir", type,
                         // Of these, each mode keeps what it has a use for.
                         "--smp.no_promises=[\"lm_head\"]",
                         "--smp.static_mode=true", "--smp.static_steps=2"},
                        ranks_as(type))
                    .finish();
    CHECK_THAT(output, ContainsSubstring("modes: dynamic equal, fast equal, "
                                         "deterministic+static equal"));
    CHECK(result("out-dynamic.json")["dynamic"] == 3);
    CHECK(result("out-fast.json")["dynamic"] == 3);
    CHECK(result("out-deterministic+static.json")["replayed"] == 2);
    CHECK_FALSE(std::filesystem::exists(path / "out.json"));
  }
  auto p = start({"tiny.toml", "--modes", "quick"});
  CHECK(p.join() == 2);
  CHECK_THAT(p.output(), ContainsSubstring("quick"));
}

TEST_CASE_METHOD(tiny_job, "All modes are those that can be named",
                 "[apps][verify]") {
  auto output = start({"tiny.toml", "--modes", "all", "--json", "out.json"},
                      threads_as_ranks)
                  .finish();
  CHECK_THAT(output,
             ContainsSubstring(
               "modes: dynamic equal, fast equal, static equal, static+fast "
               "equal, deterministic equal, deterministic+static equal, "
               "deterministic+fast equal, deterministic+static+fast equal\n"));
  for (auto mode : {"static", "static+fast", "deterministic+static"})
    CHECK(result(fmt::format("out-{}.json", mode))["replayed"] == 3);
}

TEST_CASE_METHOD(tiny_job,
                 "What deterministic_server alone does is among the modes",
                 "[apps][verify][R33]") {
  auto output = start(
                  {"tiny.toml", "--modes",
                   "deterministic,deterministic+fast,deterministic+static+fast",
                   "--json", "out.json"},
                  threads_as_ranks)
                  .finish();
  CHECK_THAT(output,
             ContainsSubstring("modes: deterministic equal, deterministic+fast "
                               "equal, deterministic+static+fast equal"));
  // Calls that go on learn for a step or more what comes back.
  CHECK(result("out-deterministic.json")["recorded"] == 1);
  for (auto mode : {"deterministic+fast", "deterministic+static+fast"}) {
    auto json = result(fmt::format("out-{}.json", mode));
    CHECK(json["recorded"].get<int>() > 1);
    CHECK(json["replayed"] == 3);
  }
}

TEST_CASE_METHOD(tiny_job, "Ranks of another launcher compare in one mode",
                 "[apps][verify]") {
  auto rank = [this](int number, const std::string& modes) {
    return train_dir::start({"verify", "tiny.toml", "--modes", modes,
                             "--run-dir", "out", "--json", "out.json"},
                            of_two_under_mpirun(number));
  };
  for (auto number : {0, 1}) {
    auto p = rank(number, "all");
    CHECK(p.join() == 2);
    CHECK(p.output()
          == "smp-train: under mpirun, srun or torchrun, --modes takes one "
             "mode; without them smp-train starts its ranks itself, for one "
             "mode after the other\n");
  }
  CHECK_FALSE(std::filesystem::exists(path / "out"));
  auto first = rank(0, "static");
  auto second = rank(1, "static");
  auto code = first.join();
  INFO(first.output());
  CHECK(code == 0);
  CHECK(second.join() == 0);
  CHECK(result("out.json")["replayed"] == 3);
}

TEST_CASE_METHOD(tiny_job, "A split job shows that modules cross ranks",
                 "[apps][verify]") {
  run({"tiny.toml", "--steps", "1", "--split", "--json", "out.json",
       "--smp.auto_partition=false"});
  CHECK(result("out.json")["requests"] > 100);
  // It places by hand what the configuration would place by cost.
  auto weighed = start({"tiny.toml", "--steps", "1", "--split",
                        "--smp.optimize=speed", "--smp.strategy=paper"},
                       threads_as_ranks);
  CHECK(weighed.join() == 0);
  CHECK_THAT(run({"tiny.toml", "--split", "--ranks", "1"}, 2),
             ContainsSubstring("--split needs two ranks"));
}

TEST_CASE_METHOD(tiny_job, "A wrong job exits with 1 and names the module",
                 "[apps][verify]") {
  struct wrong {
    const char* fault;
    const char* module;
  };
  for (auto& [fault, module] : std::vector<wrong>{
         {"dropped-layer", "transformer.h.1"},
         {"wrong-loss-scale", "lm_head"},
         {"untied-weight", "lm_head"},
       }) {
    auto p = start({"tiny.toml", "--steps=1", "--json", "out.json",
                    "--smp.strategy=paper", "--smp.trace_device=none"},
                   seeding(fault));
    auto code = p.join();
    INFO(p.output());
    CHECK(code == 1);
    CHECK_THAT(p.output(), ContainsSubstring("different: ")
                             && ContainsSubstring(module)
                             && ContainsSubstring(" instead of "));
    // A verdict is not a failure of a rank.
    CHECK(p.output().find("exited with code") == std::string::npos);
    auto json = result("out.json");
    CHECK(json["equal"] == false);
    CHECK(json["first"]["module"] == module);
    CHECK(json["differences"].get<int>() >= 1);
    CHECK(json["findings"][0] == json["first"]);
  }
}

TEST_CASE_METHOD(tiny_job, "A wrong command line of verify is refused",
                 "[apps][verify]") {
  struct wrong {
    std::vector<std::string> arguments;
    const char* text;
  };
  for (auto& [arguments, text] : std::vector<wrong>{
         {{}, "CONFIG is missing"},
         {{"nothing.toml"}, "nothing.toml"},
         {{"tiny.toml", "--steps", "0"}, "--steps"},
         {{"tiny.toml", "--steps", "few"}, "--steps"},
         {{"tiny.toml", "--json", "no/such/dir/x.json"}, "no/such/dir/x.json"},
         {{"tiny.toml", "--model.layerz=3"}, "model.layers"},
         {{"tiny.toml", "--modes", "fast,static", "--hosts",
           "a.invalid,b.invalid"},
          "over several machines, --modes takes one mode\n"},
         {{"tiny.toml", "--modes", "fast,static", "--nodes", "2", "--node-rank",
           "1", "--master", "a.invalid:29400"},
          "over several machines, --modes takes one mode\n"},
       }) {
    auto p = start(arguments);
    INFO(text);
    CHECK(p.join() == 2);
    CHECK_THAT(p.output(), ContainsSubstring(text));
  }
  CHECK_FALSE(std::filesystem::exists(path / "runs"));
}

TEST_CASE_METHOD(tiny_job, "Verify explains itself", "[apps][verify]") {
  auto output = run({"--help"});
  for (auto text : {"--steps", "--json", "--ranks", "0 equal, 1 different"})
    CHECK_THAT(output, ContainsSubstring(text));
}
