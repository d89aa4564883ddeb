// ctest: seconds=62 label=multiprocess processors=2

#include "tests/support/catch.hpp"

#include "apps/report/text_layout.hpp"
#include "runtime/checkpoint/checkpoint_dir.hpp"
#include "tests/support/runs/train_dir.hpp"

#include <sched.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

// Runs that end in the middle and others that go on from their checkpoints
// (docs/checkpoints.md).

using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::EndsWith;
using namespace smp::test;
using nlohmann::json;
namespace fs = std::filesystem;

namespace {

const std::string more = R"([optimizer]
lr = 1e-2
clip_grad_norm = 1.0

[optimizer.schedule]
type = "cosine"
warmup_steps = 3

[train]
steps = 24
eval_interval = 4
eval_steps = 1

[checkpoint]
dir = "checkpoints"
interval = 4
)";

struct checkpoint_run : train_dir {
  checkpoint_run() : train_dir(tiny_gpt(2, 4, 8, more)) {
    // nop
  }

  program
  train(std::vector<std::string> options, const std::string& run_dir,
        const std::map<std::string, std::string>& environment = {}) const {
    options.insert(options.begin(), {"tiny.toml", "--run-dir", run_dir,
                                     "--model.dropout=" + dropout});
    return start(options, environment);
  }

  /// @returns what the run wrote
  std::string
  finish(std::vector<std::string> options, const std::string& run_dir,
         const std::map<std::string, std::string>& environment = {}) const {
    auto p = train(std::move(options), run_dir, environment);
    auto code = p.join();
    INFO(p.output());
    CHECK(code == 0);
    return p.output();
  }

  std::string dropout = "0.1";

  std::string dir() const {
    return (path / "checkpoints").string();
  }

  uint64_t newest() const {
    auto x = smp::newest_checkpoint(dir());
    return x ? x->step : 0;
  }

  /// The steps of some runs, one after the other; a later run counts.
  std::map<uint64_t, json> steps(const std::vector<std::string>& runs) const {
    std::map<uint64_t, json> result;
    for (auto& run : runs)
      for (auto& x : metrics(run))
        result[x["step"]] = x;
    return result;
  }

  void check_same_bits(const std::vector<std::string>& runs,
                       const std::string& whole) const {
    auto found = steps(runs), expected = steps({whole});
    REQUIRE(found.size() == expected.size());
    for (auto& [step, x] : expected)
      for (auto key : {"loss", "grad_norm", "lr"}) {
        INFO("step " << step << ", " << key);
        CHECK(found.at(step)[key] == x[key]);
      }
  }
};

const std::string same_bits = "--smp.deterministic_server=true";

/// Waits for a file, looking all the time.
bool appears(const fs::path& x) {
  auto end = std::chrono::steady_clock::now() + std::chrono::seconds{60};
  while (!fs::exists(x)) {
    if (std::chrono::steady_clock::now() > end)
      return false;
    ::sched_yield();
  }
  return true;
}

} // namespace

TEST_CASE_METHOD(checkpoint_run,
                 "a run that goes on has the losses of one that never stopped",
                 "[apps][checkpoint][R51]") {
  auto whole = finish({}, "whole");
  CHECK_THAT(whole, ContainsSubstring("24/24  checkpoint at step 24")
                      && ContainsSubstring("saved     6 checkpoints, which "
                                           "held up the steps for")
                      && ContainsSubstring(dir() + "/step-24"));
  CHECK(smp::complete_checkpoints(dir()).size() == 2);
  auto lines = metrics("whole");
  REQUIRE(lines.size() == 24);
  for (auto& x : lines) {
    auto step = x["step"].get<int>();
    CHECK(x.contains("checkpoint_seconds") == (step > 1 && step % 4 == 1));
  }
  fs::remove_all(dir());
  auto killed = train({}, "killed");
  REQUIRE(killed.wait_for("checkpoint at step 8"));
  killed.signal(SIGKILL);
  killed.join();
  auto from = newest();
  REQUIRE(from >= 8);
  auto rest = finish({}, "rest");
  CHECK_THAT(rest, ContainsSubstring("resume    from " + dir() + "/step-"
                                     + std::to_string(from) + ", after "
                                     + std::to_string(from) + " steps"));
  CHECK(metrics("rest").size() == 24 - from);
  auto found = steps({"killed", "rest"}), expected = steps({"whole"});
  REQUIRE(found.size() == expected.size());
  for (auto& [step, x] : expected)
    for (auto key : {"loss", "grad_norm"}) {
      INFO("step " << step << ", " << key);
      CHECK(found.at(step)[key].get<double>()
            == Catch::Approx(x[key].get<double>()).epsilon(1e-4));
    }
}

TEST_CASE_METHOD(checkpoint_run,
                 "who is killed while it saves goes on to the last bit",
                 "[apps][checkpoint][R51]") {
  finish({same_bits, "--checkpoint.dir=other"}, "whole");
  int number = 0;
  for (std::string sign :
       {"step-8", "step-8/model-0.safetensors", "step-8/state-1.safetensors",
        "step-8/manifest.json"}) {
    INFO("killed when " << sign << " was there");
    fs::remove_all(dir());
    auto name = std::to_string(number++);
    // Nothing that is looked for goes away meanwhile.
    auto killed = train({same_bits, "--checkpoint.keep=100"}, "killed" + name);
    REQUIRE(appears(path / "checkpoints" / sign));
    killed.signal(SIGKILL);
    killed.join();
    REQUIRE(newest() >= 4);
    finish({same_bits, "--checkpoint.keep=1"}, "rest" + name);
    check_same_bits({"killed" + name, "rest" + name}, "whole");
  }
}

TEST_CASE_METHOD(checkpoint_run,
                 "a run that goes on after its first step has the same bits",
                 "[apps][checkpoint][R51]") {
  int number = 0;
  for (std::string mode : {"--smp.static_mode=false", "--smp.static_mode=true"})
    for (int stop : {1, 2, 5}) {
      INFO(mode << ", after step " << stop);
      fs::remove_all(dir());
      for (auto run : {"whole", "begin", "rest"})
        fs::remove_all(path / run);
      const std::vector<std::string> all{
        same_bits, mode, "--optimizer.schedule.type=constant",
        "--train.steps=8", "--checkpoint.interval=100"};
      auto first = all;
      first[3] = "--train.steps=" + std::to_string(stop);
      auto alone = all;
      alone.push_back("--checkpoint.dir=other" + std::to_string(number++));
      finish(alone, "whole");
      finish(first, "begin");
      finish(all, "rest");
      check_same_bits({"begin", "rest"}, "whole");
    }
}

TEST_CASE_METHOD(checkpoint_run,
                 "replicas with parts and shared modules go on to the last bit",
                 "[apps][checkpoint][R51]") {
  using words = std::vector<std::string>;
  auto grid = GENERATE(
    words{"--smp.shard_optimizer_state=true", "--smp.shard_gradients=true"},
    words{"--smp.tensor_parallel_degree=2",
          R"(--tensor_parallel.modules=["transformer.h"])"});
  INFO(grid[0]);
  auto all = grid;
  all.insert(all.end(), {same_bits, "--smp.ddp=true", "--ranks", "4",
                         "--smp.trace_device=none", // measures nothing
                         "--optimizer.schedule.type=constant",
                         "--checkpoint.interval=100"});
  auto finish_at = [&](int steps, const std::string& checkpoints,
                       const std::string& run) {
    auto options = all;
    options.push_back("--train.steps=" + std::to_string(steps));
    options.push_back("--checkpoint.dir=" + checkpoints);
    finish(options, run);
  };
  finish_at(8, "other", "whole");
  finish_at(3, "checkpoints", "begin");
  finish_at(8, "checkpoints", "rest");
  check_same_bits({"begin", "rest"}, "whole");
}

TEST_CASE("gradients of a module that runs several times go on to the last bit",
          "[apps][checkpoint][R51]") {
  train_dir dir{script_defaults(2, 4, 0.1, 12)};
  for (std::string file : {"pt", "batch.safetensors"})
    fs::copy_file(source_file("tests/data/zoo/reused." + file),
                  dir.path / (file == "pt" ? "model.pt" : file));
  auto finish = [&](const std::string& run, const std::string& checkpoints,
                    int steps) {
    dir.run({"tiny.toml", "--run-dir", run, same_bits,
             "--smp.manual_partition={\"level\" = 1}",
             "--checkpoint.dir=" + checkpoints,
             "--train.steps=" + std::to_string(steps)});
    return dir.metrics(run);
  };
  auto whole = finish("whole", "other", 12);
  finish("begin", "checkpoints", 6);
  auto rest = finish("rest", "checkpoints", 12);
  REQUIRE(whole.size() == 12);
  REQUIRE(rest.size() == 6);
  for (size_t i = 0; i < rest.size(); ++i) {
    INFO("step " << i + 7);
    CHECK(rest[i]["loss"] == whole[i + 6]["loss"]);
    CHECK(rest[i]["grad_norm"] == whole[i + 6]["grad_norm"]);
  }
}

TEST_CASE_METHOD(checkpoint_run, "what a run that goes on counts is its own",
                 "[apps][checkpoint]") {
  finish({"--train.steps=4"}, "begin");
  auto text = finish({"--train.log_interval=1", "--smp.static_mode=true"},
                     "rest");
  CHECK_THAT(text, ContainsSubstring(" of 20 steps replayed"));
  auto first = metrics("rest").at(0);
  REQUIRE(first["step"] == 5);
  // All that is known of the time of a step is that of the first one.
  auto left = smp::app::duration_text(19 * first["step_seconds"].get<double>());
  auto begin = text.find("\n       5/24 ");
  REQUIRE(begin != std::string::npos);
  auto row = text.substr(begin + 1, text.find('\n', begin + 1) - begin - 1);
  CHECK_THAT(row, EndsWith(" " + left));
}

TEST_CASE_METHOD(checkpoint_run, "a run goes on with other ranks",
                 "[apps][checkpoint][R51]") {
  dropout = "0"; // replicas draw numbers of their own
  const std::string constant = "--optimizer.schedule.type=constant";
  finish({constant, "--checkpoint.dir=other"}, "whole");
  finish({constant, "--train.steps=8"}, "begin");
  fs::copy(dir(), path / "copy", fs::copy_options::recursive);
  const std::vector<std::vector<std::string>> grids{
    {"--ranks", "1"},
    {"--ranks", "4", "--smp.ddp=true", "--data.batch_size=4",
     "--smp.microbatches=2"},
    {"--smp.ddp=true", "--smp.tensor_parallel_degree=2",
     "--tensor_parallel.modules=[\"transformer.*\"]", "--data.batch_size=4",
     "--smp.microbatches=2"}};
  for (size_t i = 0; i < grids.size(); ++i) {
    INFO("grid " << i);
    fs::remove_all(dir());
    fs::copy(path / "copy", dir(), fs::copy_options::recursive);
    auto name = "grid" + std::to_string(i);
    auto options = grids[i];
    options.push_back(constant);
    finish(options, name);
    auto found = steps({name}), expected = steps({"whole"});
    CHECK(found.size() == 16);
    for (auto& [step, x] : found) {
      INFO("step " << step);
      CHECK(x["loss"].get<double>()
            == Catch::Approx(expected.at(step)["loss"].get<double>())
                 .epsilon(1e-3));
    }
  }
}

TEST_CASE_METHOD(checkpoint_run, "Ctrl-C and SIGTERM save, and SIGUSR1 goes on",
                 "[apps][checkpoint]") {
  const std::vector<std::string> options{"--checkpoint.interval=1000",
                                         "--train.steps=100000"};
  uint64_t before = 0;
  // Processes have a launcher, which hears it; threads hear it themselves.
  for (auto& [number, threads] :
       {std::pair{SIGINT, false}, {SIGTERM, false}, {SIGTERM, true}}) {
    auto name = std::to_string(number) + (threads ? "threads" : "processes");
    auto p = threads ? train(options, name, threads_as_ranks)
                     : train(options, name);
    REQUIRE(p.wait_for(std::to_string(before + 10) + "/100000"));
    p.signal(SIGUSR1);
    REQUIRE(p.wait_for("checkpoint at step "));
    auto later = (newest() / 10 + 2) * 10;
    REQUIRE(p.wait_for(std::to_string(later) + "/100000"));
    p.signal(number);
    CHECK(p.join() == 130);
    CHECK_THAT(p.output(), ContainsSubstring("/smp-train tiny.toml --model."
                                             "dropout=0.1 --checkpoint."
                                             "interval=1000 "));
    auto last = metrics(name).back()["step"].get<uint64_t>();
    CHECK(newest() == last);
    before = last / 10 * 10;
  }
  auto p = train({"--train.steps=100000", "--checkpoint.interval=100000",
                  "--checkpoint.on_interrupt=false"},
                 "other");
  REQUIRE(p.wait_for(std::to_string(before + 10) + "/100000"));
  p.signal(SIGINT);
  CHECK(p.join() == 130);
  CHECK_THAT(p.output(), !ContainsSubstring("checkpoint at step"));
}

TEST_CASE_METHOD(checkpoint_run,
                 "A run in the background outlives its terminal, and SIGTERM "
                 "saves",
                 "[apps][checkpoint]") {
  // As after `nohup smp-train ... &` in a script: both are ignored.
  auto begin = [this](const std::string& name) {
    return program{{"sh", "-c",
                    "unset UCX_DEBUG_SIGNO; trap '' HUP INT; exec \"$@\"", "sh",
                    built_program("smp-train"), "tiny.toml", "--run-dir", name,
                    "--checkpoint.interval=1000", "--train.steps=100000"},
                   path};
  };
  auto p = begin("long");
  REQUIRE(p.wait_for("10/100000"));
  p.signal(SIGHUP);
  REQUIRE(p.wait_for("50/100000"));
  p.signal(SIGTERM);
  CHECK(p.join() == 130);
  CHECK_THAT(p.output(), ContainsSubstring("checkpoint at step "));
  // A rank that has no handler yet ends at once: not after 30 s.
  auto q = begin("short");
  REQUIRE(q.wait_for("smp-train"));
  q.signal(SIGTERM);
  CHECK(q.join(std::chrono::seconds{25}) == 130);
}

TEST_CASE_METHOD(checkpoint_run, "Ranks of another launcher save on SIGTERM",
                 "[apps][checkpoint]") {
  auto rank = [this](int number) {
    return start({"tiny.toml", "--run-dir=run", "--ranks=2",
                  "--checkpoint.interval=1000", "--train.steps=100000"},
                 of_two_under_mpirun(number));
  };
  auto first = rank(0), second = rank(1);
  REQUIRE(first.wait_for("10/100000"));
  first.signal(SIGTERM); // all get it, as from scancel
  second.signal(SIGTERM);
  CHECK(first.join() == 130);
  CHECK(second.join() == 130);
  CHECK_THAT(first.output(), ContainsSubstring("checkpoint at step "));
  CHECK(newest() == metrics("run").back()["step"].get<uint64_t>());
}

TEST_CASE_METHOD(checkpoint_run,
                 "an interrupted run has as long as the configuration says",
                 "[apps][checkpoint]") {
  auto [by_ssh, seconds] = GENERATE(
    table<bool, int>({{false, 1}, {true, 1}, {true, 100}}));
  // What the other machine would do, this one does.
  auto ssh = write("bin/ssh", "#!/bin/sh\nexec sh -c \"$6\"\n");
  fs::permissions(ssh, fs::perms::owner_all);
  std::vector<std::string> words{
    "tiny.toml", "--run-dir=run", "--train.steps=100000",
    "--checkpoint.interval=100000",
    "--checkpoint.interrupt_grace=" + std::to_string(seconds)};
  if (by_ssh)
    words.push_back("--hosts=here:2");
  auto p = start(
    words, {{"PATH", (path / "bin").string() + ':' + std::getenv("PATH")}});
  REQUIRE(p.wait_for("10/100000"));
  auto stopped = process_of(1);
  REQUIRE(::kill(stopped, SIGSTOP) == 0);
  p.signal(SIGINT);
  const bool saves = seconds > 1;
  if (saves) {
    CHECK_FALSE(p.wait_for("checkpoint at step ", std::chrono::seconds{11}));
    REQUIRE(::kill(stopped, SIGCONT) == 0);
  }
  // Without the key the end would come after 32 s.
  auto code = p.join(std::chrono::seconds{saves ? 100 : 20});
  INFO(p.output());
  CHECK(code == 130);
  CHECK((newest() > 0) == saves);
}

TEST_CASE_METHOD(checkpoint_run,
                 "a full disk ends the run, not its checkpoints",
                 "[apps][checkpoint]") {
  const std::vector<std::string> constant{"--optimizer.schedule.type=constant"};
  auto options = constant;
  options.push_back("--train.steps=4");
  finish(options, "begin", threads_as_ranks);
  auto output = program{{"bash", "-c",
                         "ulimit -f 8; exec " + built_program("smp-train")
                           + " tiny.toml --run-dir limited --model.dropout=0.1 "
                             "--optimizer.schedule.type=constant"},
                        path,
                        threads_as_ranks}
                  .finish(2);
  CHECK_THAT(
    output, ContainsSubstring("resume    from " + dir() + "/step-4")
              && ContainsSubstring("cannot write " + dir() + "/step-8/model-"));
  CHECK(newest() == 4);
  CHECK(std::distance(fs::directory_iterator{dir()}, {}) == 2); // with its lock
  finish(constant, "rest", threads_as_ranks);
  CHECK(newest() == 24);
}

TEST_CASE_METHOD(checkpoint_run,
                 "what makes another training is refused before it begins",
                 "[apps][checkpoint]") {
  finish({"--train.steps=8"}, "run");
  auto told = [&](std::vector<std::string> options) {
    for (bool check : {true, false}) {
      auto arguments = options;
      arguments.insert(arguments.begin(), "--model.dropout=0.1");
      arguments.insert(arguments.begin(), "tiny.toml");
      if (check)
        arguments.insert(arguments.begin(), "check");
      else
        arguments.insert(arguments.end(), {"--run-dir", "refused"});
      auto output = run(arguments, 2);
      if (!check)
        return output;
      CHECK_THAT(output, ContainsSubstring("checkpoint"));
    }
    return std::string{};
  };
  auto from = "cannot go on from " + dir() + "/step-8: ";
  CHECK_THAT(told({"--data.shuffle_seed=2"}),
             ContainsSubstring(from
                               + "data.shuffle_seed = 2, there 1; write "
                                 "what it was, or another checkpoint.dir"));
  CHECK_THAT(told({"--model.width=32"}), ContainsSubstring("model.width = 32"));
  CHECK_THAT(told({"--optimizer.type=sgd"}),
             ContainsSubstring("optimizer.type = \"sgd\""));
  CHECK_THAT(told({"--data.batch_size=4"}),
             ContainsSubstring("samples per step (data.batch_size times "
                               "replicas) = 4, there 8"));
  CHECK_THAT(told({"--train.steps=7"}),
             ContainsSubstring("8 steps are done, train.steps = 7"));
  CHECK_THAT(
    told({"--checkpoint.resume=none"}),
    ContainsSubstring("but checkpoint.dir holds " + dir() + "/step-8"));
  CHECK_THAT(told({"--checkpoint.resume=nowhere"}),
             ContainsSubstring("nowhere\": no complete checkpoint is there"));
  CHECK_THAT(told({"--checkpoint.resume=checkpoints/step-4"}),
             ContainsSubstring("holds a newer one"));
  fs::create_directories(path / "older");
  fs::copy(path / "checkpoints/step-4", path / "older/step-4");
  CHECK_THAT(told({"--checkpoint.resume=older"}),
             ContainsSubstring("holds a newer one"));
  std::ofstream{path / "checkpoints/step-8/manifest.json"} << "{}";
  CHECK_THAT(told({}), ContainsSubstring("step-8/manifest.json: it is not the "
                                         "manifest")
                         && ContainsSubstring("without this folder, " + dir()
                                              + "/step-4 is the newest"));
  CHECK_FALSE(fs::exists(path / "refused/metrics.jsonl"));
}

TEST_CASE_METHOD(checkpoint_run, "a run can branch off an older checkpoint",
                 "[apps][checkpoint]") {
  finish({"--train.steps=8"}, "run");
  auto text = finish({"--checkpoint.resume=checkpoints/step-4",
                      "--checkpoint.dir=branch", "--optimizer.lr=0.002"},
                     "branch-run");
  CHECK_THAT(text, ContainsSubstring("resume    from " + dir() + "/step-4")
                     && ContainsSubstring("changed   optimizer.lr = 0.002, was "
                                          "0.01"));
  CHECK(metrics("branch-run").size() == 20);
  CHECK(newest() == 8);
  // What is done is done: evaluated once more.
  auto done = finish({"--train.steps=8"}, "done");
  CHECK_THAT(done, ContainsSubstring("done after 8 of 8 steps")
                     && ContainsSubstring("held out"));
}

TEST_CASE_METHOD(checkpoint_run, "verify leaves checkpoints alone",
                 "[apps][checkpoint][verify]") {
  run({"verify", "tiny.toml", "--steps", "2", "--run-dir", "run"});
  CHECK_FALSE(fs::exists(dir()));
}
