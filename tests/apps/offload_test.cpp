// ctest: seconds=14 label=multiprocess processors=2

#include "tests/support/catch.hpp"

#include "tests/support/runs/processes.hpp"
#include "tests/support/runs/train_dir.hpp"

#include <csignal>
#include <filesystem>
#include <string>
#include <vector>

#include <sys/stat.h>

// Arguments of checkpointed calls in a file (docs/activation_checkpointing.md)
// over processes.

using Catch::Matchers::ContainsSubstring;
using namespace smp::test;

namespace {

namespace fs = std::filesystem;

using arguments = std::vector<std::string>;

/// Arguments of 16 KB for each microbatch and layer.
constexpr const char* small_gpt = R"([smp]
pipeline_parallel_degree = 2
microbatches = 4
offload_activations = true

[activation_checkpointing]
modules = ["transformer.h"]

[model]
type = "gpt"
layers = 12
heads = 2
width = 64
dropout = 0.1

[data]
type = "text"
path = "text.txt"
sequence_length = 32
batch_size = 8

[train]
steps = 4
save_model = true
)";

struct offload_run : train_dir {
  offload_run() : train_dir(small_gpt) {
    fs::create_directory(path / "offloaded");
  }

  bool is_clean() const {
    return fs::is_empty(path / "offloaded");
  }
};

arguments joined(arguments a, const arguments& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

/// @returns bytes of the files in `folder` that `x` has open and that have no
/// name
uint64_t unnamed_bytes(pid_t x, const fs::path& folder) {
  uint64_t result = 0;
  std::error_code ignored;
  auto links = fs::path{"/proc"} / std::to_string(x) / "fd";
  for (auto& entry : fs::directory_iterator{links, ignored}) {
    auto target = fs::read_symlink(entry.path(), ignored).string();
    struct stat file {};
    if (target.starts_with(folder.string()) && target.ends_with(" (deleted)")
        && ::stat(entry.path().c_str(), &file) == 0)
      result += static_cast<uint64_t>(file.st_size);
  }
  return result;
}

} // namespace

TEST_CASE_METHOD(offload_run, "what was in a file equals one process",
                 "[apps][verify][R57]") {
  auto options = GENERATE(
    arguments{}, arguments{"--smp.activation_loading_horizon=1"},
    arguments{"--smp.static_mode=true", "--smp.static_steps=2"},
    arguments{"--smp.pipeline=simple", "--smp.fast_mode=false"},
    arguments{"--smp.pipeline=1f1b", "--smp.deterministic_server=true",
              "--activation_checkpointing.strategy=group_2"},
    arguments{"--smp.ddp=true", "--ranks", "4", "--smp.bf16_params=true"},
    arguments{"--smp.pipeline_parallel_degree=1"});
  CAPTURE(options);
  CHECK_THAT(run(joined({"verify", "tiny.toml", "--steps", "4", "--run-dir",
                         "run", "--smp.offload_dir=offloaded"},
                        options)),
             ContainsSubstring("equal: 4 steps"));
  CHECK(is_clean());
}

TEST_CASE("arguments of an exported model are in a file",
          "[apps][verify][R57]") {
  train_dir dir{script_defaults(2, 2, 0.1, 3)};
  for (std::string file : {"pt", "batch.safetensors"})
    fs::copy_file(source_file("tests/data/zoo/hf_gpt2." + file),
                  dir.path / (file == "pt" ? "model.pt" : file));
  CHECK_THAT(
    dir.run({"verify", "tiny.toml", "--smp.offload_activations=true",
             "--activation_checkpointing.modules=[\"*\"]",
             "--smp.activation_loading_horizon=1", "--run-dir", "run"}),
    ContainsSubstring("equal: 3 steps"));
}

TEST_CASE_METHOD(offload_run, "a run learns the same bits with a file",
                 "[apps][R57]") {
  for (std::string offload : {"true", "false"})
    run({"tiny.toml", "--run-dir", offload, "--smp.pipeline_parallel_degree=1",
         "--smp.offload_activations=" + offload});
  auto with = metrics("true"), without = metrics("false");
  REQUIRE(with.size() == 4);
  for (size_t i = 0; i < with.size(); ++i) {
    CHECK(with[i]["loss"] == without[i]["loss"]);
    CHECK(with[i]["grad_norm"] == without[i]["grad_norm"]);
    // Of 12 arguments of a microbatch, 4 may be wanted before they are written,
    // and 4 are when it turns around.
    CHECK(with[i]["offloaded_bytes"].get<uint64_t>() >= 4 * 4 * 16384);
    CHECK(with[i]["offload_wait_seconds"].get<double>() >= 0);
    CHECK_FALSE(without[i].contains("offloaded_bytes"));
  }
  CHECK(content_of(path / "true/model.safetensors")
        == content_of(path / "false/model.safetensors"));
}

TEST_CASE_METHOD(offload_run, "whoever is killed leaves no file behind",
                 "[apps][faults][R57]") {
  auto p = start({"tiny.toml", "--train.steps=100000", "--run-dir", "run",
                  "--smp.offload_dir=offloaded", "--smp.threads=1"});
  auto folder = fs::canonical(path / "offloaded");
  // A line for each of the first steps, or every tenth.
  REQUIRE(p.wait_for("1/100000"));
  auto ranks = children_of(p.pid());
  REQUIRE(ranks.size() == 2);
  for (auto rank : ranks)
    CHECK(unnamed_bytes(rank, folder) > 0);
  CHECK(is_clean());
  ::kill(ranks[1], SIGKILL);
  CHECK(p.join() == 3);
  CHECK_THAT(p.output(), ContainsSubstring("SIGKILL"));
  CHECK(is_clean());
}

TEST_CASE_METHOD(offload_run,
                 "a folder in memory is told, one that is not "
                 "there ends the run",
                 "[apps][R57]") {
  run({"tiny.toml", "--run-dir", "a", "--train.steps=1",
       "--smp.offload_dir=/dev/shm"});
  CHECK_THAT(content_of(path / "a/log-1.txt"),
             ContainsSubstring("'/dev/shm' is in memory")
               && ContainsSubstring("smp.offload_dir"));
  CHECK_THAT(run({"tiny.toml", "--run-dir", "b", "--train.steps=1",
                  "--smp.offload_dir=nowhere"},
                 2),
             ContainsSubstring("cannot make a file in '")
               && ContainsSubstring("nowhere"));
}
