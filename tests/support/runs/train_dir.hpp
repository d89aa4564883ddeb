#pragma once

#include "tests/support/runs/program.hpp"
#include "tests/support/scratch_dir.hpp"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <chrono>
#include <filesystem>
#include <map>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <sys/types.h>

namespace smp::test {

/// A GPT so small that a step takes milliseconds, on the text of a `train_dir`.
/// @param more ends the configuration
inline std::string tiny_gpt(int layers, int microbatches, int batch_size,
                            const std::string& more) {
  return fmt::format(R"([smp]
pipeline_parallel_degree = 2
microbatches = {}

[model]
type = "gpt"
layers = {}
heads = 2
width = 16

[data]
type = "text"
path = "text.txt"
sequence_length = 16
batch_size = {}

{})",
                     microbatches, layers, batch_size, more);
}

/// A run of two ranks that takes hours, a step milliseconds.
/// @param more ends the configuration
inline std::string endless_gpt(const std::string& more = "") {
  return tiny_gpt(2, 2, 4, R"([train]
steps = 1000000
log_interval = 1
eval_steps = 0

)" + more);
}

/// `config`, in which LIBRARY stands for a plug-in that was built with the
/// tests.
inline std::string with_library(std::string config, const std::string& name) {
  auto path = built_program("../lib/" + name + ".so");
  return config.replace(config.find("LIBRARY"), 7,
                        std::filesystem::canonical(path).string());
}

/// A TorchScript file model.pt on one batch, with no key that the README does
/// not set.
inline std::string script_defaults(int64_t ranks, int64_t microbatches,
                                   double rate, int steps) {
  return fmt::format(R"([smp]
pipeline_parallel_degree = {}
microbatches = {}

[model]
type = "torchscript"
path = "model.pt"

[data]
type = "safetensors"
path = "batch.safetensors"

[optimizer]
type = "sgd"
lr = {}

[train]
steps = {}
save_model = true
)",
                     ranks, microbatches, rate, steps);
}

/// Makes the ranks of an smp-train threads of its process.
inline const std::map<std::string, std::string> threads_as_ranks{
  {"SMP_TEST_THREADS_AS_RANKS", "1"}};

/// Sends large tensors through arenas, as between devices.
inline const std::map<std::string, std::string> device_path{
  {"SMP_TEST_DEVICE_PATH", "16"}};

/// A directory with a configuration, tiny.toml, and the text that it may name,
/// text.txt; smp-train runs there.
struct train_dir : scratch_dir {
  explicit train_dir(const std::string& config) {
    write("tiny.toml", config);
    std::string text;
    for (int i = 0; i < 200; ++i)
      text += "the quick brown fox jumps over the lazy dog\n";
    write("text.txt", text);
  }

  /// smp-train with these arguments, in that directory.
  program start(std::vector<std::string> arguments,
                std::map<std::string, std::string> environment = {}) const {
    arguments.insert(arguments.begin(), built_program("smp-train"));
    return program{std::move(arguments), path, std::move(environment)};
  }

  /// The same to its end. @returns what it wrote
  std::string run(std::vector<std::string> arguments, int expected = 0) const {
    return start(std::move(arguments)).finish(expected);
  }

  /// What mpirun tells one of two ranks, which find each other here.
  std::map<std::string, std::string> of_two_under_mpirun(int rank) const {
    return {{"OMPI_COMM_WORLD_RANK", std::to_string(rank)},
            {"OMPI_COMM_WORLD_SIZE", "2"},
            {"OMPI_COMM_WORLD_LOCAL_RANK", std::to_string(rank)},
            {"PMIX_NAMESPACE", path.filename()},
            {"SMP_RENDEZVOUS_DIR", path}};
  }

  /// @returns the process of a rank, the last one that its log in the run
  /// directory "run" has; a launcher may still be writing what the rank told it
  pid_t process_of(size_t rank) const {
    const std::string before = "process ";
    auto log = path / "run" / fmt::format("log-{}.txt", rank);
    auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds{10};
    for (;;) {
      auto text = content_of(log);
      auto begin = text.rfind(before);
      if (begin != text.npos && text.find('\n', begin) != text.npos)
        return std::stoi(text.substr(begin + before.size()));
      REQUIRE(std::chrono::steady_clock::now() < deadline);
      std::this_thread::yield();
    }
  }

  /// @returns the steps of a run, as metrics.jsonl has them
  std::vector<nlohmann::json> metrics(const std::string& run_dir) const {
    std::istringstream lines{content_of(path / run_dir / "metrics.jsonl")};
    std::vector<nlohmann::json> result;
    for (std::string line; std::getline(lines, line);)
      result.push_back(nlohmann::json::parse(line));
    return result;
  }
};

} // namespace smp::test
