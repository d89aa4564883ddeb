// ctest: seconds=24 label=multiprocess
#include "tests/support/catch.hpp"

#include "runtime/session/rank_runtime.hpp"
#include "runtime/session/session.hpp"
#include "tests/support/runs/own_ranks.hpp"
#include "tests/support/scratch_dir.hpp"
#include "tests/support/torch/equality.hpp"
#include "transport/placing_fabric.hpp"

#include <fmt/format.h>
#include <torch/torch.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

// The device path, forced: this program starts itself as the ranks of a run.

using namespace smp;
using namespace smp::test;

namespace {

constexpr uint64_t microbatches = 4;

session_config config_of(uint64_t ranks, bool device, uint64_t per_node,
                         uint64_t arena) {
  session_config result;
  result.pipeline_parallel_degree = ranks;
  result.threads = 1;
  if (device)
    result.device_path = {.force = true,
                          .send_arena = arena,
                          .receive_arena = arena,
                          .ranks_per_node = per_node};
  return result;
}

uint64_t number(const char* name) {
  return std::stoull(std::getenv(name));
}

/// What passed each stage, one line each: "D2D SEND 17 0".
std::string lines_of(const comm_report& x) {
  std::string result;
  for (auto& y : x.stages)
    result += fmt::format("{}: {} handled, {} passed by\n", to_string(y.stage),
                          y.handled, y.passed_by);
  for (size_t i = 0; i < comm_rules; ++i)
    result += fmt::format("sent, {}: {}\n",
                          to_string(static_cast<comm_rule>(i)), x.sent[i]);
  return result;
}

uint64_t handled(const comm_report& x, comm_stage stage) {
  return x.stages.at(static_cast<size_t>(stage)).handled;
}

void run(const scratch_dir& dir, uint64_t ranks, bool device, uint64_t per_node,
         uint64_t arena,
         const std::string& test = "rank of a run on the device path") {
  require_case(dir, test, ranks,
               {{"TEST_RANKS", std::to_string(ranks)},
                {"TEST_DEVICE", device ? "1" : "0"},
                {"TEST_PER_NODE", std::to_string(per_node)},
                {"TEST_ARENA", std::to_string(arena)}});
}

void check_numbers(const std::filesystem::path& dir) {
  auto steps = load(dir / "steps.safetensors");
  CHECK(differences(steps, 1, microbatches, 0.1) == std::vector<std::string>{});
}

/// Owned by the other rank: cheap for what it sends.
struct scale_impl : torch::nn::Module {
  torch::Tensor forward(torch::Tensor x) {
    return x * weight;
  }
  torch::Tensor weight = register_parameter("weight", torch::full({1024}, 2.0));
};
TORCH_MODULE_IMPL(scale, scale_impl);

struct wide_model_impl : torch::nn::Module {
  wide_model_impl() {
    register_module("other", other);
  }

  torch::Tensor forward(torch::Tensor x) {
    return other(x + bias).square().mean();
  }

  submodule<scale> other;
  torch::Tensor bias = register_parameter("bias", torch::zeros({1024}));
};
TORCH_MODULE_IMPL(wide_model, wide_model_impl);

/// Each message is a tensor of 70 MB there and back, in both phases.
/// @returns losses and gradients, exactly
std::string wide_steps(session& s) {
  distributed_model m{wide_model{}};
  set_partition(*m->other, 1);
  m.partition();
  auto train_step = step([&](torch::Tensor x) {
    auto loss = m(x);
    m.backward(loss);
    return loss;
  });
  std::string result;
  auto x = torch::sin(torch::arange(17920 * 1024, torch::kFloat))
             .view({-1, 1024});
  for (int i = 0; i < 2; ++i) {
    auto loss = train_step(x + i).outputs().at(0);
    result += fmt::format("{:a}\n", loss.item<double>());
    auto gradients = m.gradients();
    if (s.rank() == 0)
      for (auto& [name, t] : gradients)
        result += fmt::format("{} {:a}\n", name,
                              t.to(torch::kDouble).sum().item<double>());
    for (auto& p : m.local_parameters())
      p.mutable_grad() = torch::Tensor{};
  }
  return result;
}

} // namespace

TEST_CASE("rank of a run with tensors of 70 MB", "[.rank]") {
  auto ranks = number("TEST_RANKS");
  auto config = config_of(ranks, number("TEST_DEVICE") == 1,
                          number("TEST_PER_NODE"), number("TEST_ARENA"));
  config.auto_partition = false;
  session s{config};
  auto numbers = wide_steps(s);
  std::string dir = std::getenv("TEST_DIR");
  if (s.rank() == 0)
    std::ofstream{dir + "/numbers.txt"} << numbers;
  std::ofstream{fmt::format("{}/stages-{}.txt", dir, s.rank())}
    << lines_of(s.internals().communication());
}

TEST_CASE("tensors larger than a chunk are the same on every path",
          "[runtime][equality]") {
  const std::string test = "rank of a run with tensors of 70 MB";
  scratch_dir plain;
  run(plain, 2, false, 0, 0, test);
  auto expected = content_of(plain.path / "numbers.txt");
  REQUIRE_FALSE(expected.empty());
  for (uint64_t per_node : {0, 1}) {
    scratch_dir dir;
    run(dir, 2, true, per_node, 256, test);
    CHECK(content_of(dir.path / "numbers.txt") == expected);
    auto text = content_of(dir.path / "stages-0.txt");
    INFO(text);
    CHECK(text.find("sent, device path: 0\n") == std::string::npos);
  }
}

TEST_CASE("rank of a run on the device path", "[.rank]") {
  auto ranks = number("TEST_RANKS");
  session s{config_of(ranks, number("TEST_DEVICE") == 1,
                      number("TEST_PER_NODE"), number("TEST_ARENA"))};
  auto steps = run_steps(s, microbatches, 0.1);
  std::string dir = std::getenv("TEST_DIR");
  if (s.pp_rank() == 0)
    save(dir + "/steps.safetensors", steps);
  std::ofstream{fmt::format("{}/stages-{}.txt", dir, s.rank())}
    << lines_of(s.internals().communication());
}

TEST_CASE("a run on the device path gives the numbers of one process",
          "[runtime][equality]") {
  // On one node, on nodes of one rank each, and with arenas that are too small.
  auto [ranks, per_node, arena] = GENERATE(table<uint64_t, uint64_t, uint64_t>(
    {{2, 0, 64}, {2, 1, 64}, {4, 2, 16}, {2, 1, 0}}));
  CAPTURE(ranks, per_node, arena);
  scratch_dir dir;
  run(dir, ranks, true, per_node, arena);
  check_numbers(dir.path);
  for (uint64_t i = 0; i < ranks; ++i) {
    auto text = content_of(dir.path / fmt::format("stages-{}.txt", i));
    INFO("rank " << i << '\n' << text);
    auto works = [&](const std::string& stage) {
      return text.find(stage + ": 0 handled") == std::string::npos;
    };
    auto sees = [&](const std::string& stage) {
      return text.find(stage + ": 0 handled, 0 passed") == std::string::npos;
    };
    CHECK(works("D2D ALLOCATOR"));
    CHECK(works("COMM INITIATOR"));
    auto uses_arena = arena > 0;
    auto on_node = per_node != 1;
    auto between = per_node != 0;
    CHECK(works("D2D SEND") == (uses_arena && on_node));
    CHECK(sees("D2D RECV") == (uses_arena && on_node));
    CHECK(sees("CROSS-NODE PROGRESS") == (uses_arena && between));
    CHECK(works("IO SEND WATCHER") == (uses_arena && between));
    CHECK(works("IO RECV WATCHER") == (uses_arena && between));
    CHECK((text.find("sent, device path: 0\n") == std::string::npos)
          == uses_arena);
    CHECK((text.find("sent, no space: 0\n") != std::string::npos)
          == uses_arena);
    CHECK(works("COMM TRACKER") == !uses_arena);
  }
}

TEST_CASE("a run without devices pays for no arena and takes the host path",
          "[runtime][equality]") {
  scratch_dir dir;
  run(dir, 2, false, 0, 64);
  check_numbers(dir.path);
  auto text = content_of(dir.path / "stages-0.txt");
  INFO(text);
  CHECK(text.find("sent, host tensor: 0\n") == std::string::npos);
  CHECK(text.find("D2D ALLOCATOR: 0 handled") != std::string::npos);
  CHECK(text.find("COMM PREPROCESSING: 0 handled") != std::string::npos);
  CHECK(text.find("COMM PREPROCESSING: 0 handled, 0 passed")
        == std::string::npos);
}

TEST_CASE("ranks of one process take the device path too",
          "[runtime][equality]") {
  auto per_node = GENERATE(0u, 1u);
  virtual_world_options x;
  x.config = config_of(2, true, per_node, 16);
  std::vector<step_numbers> steps;
  uint64_t through_arena = 0;
  run_virtual_world(2, x, [&](session& s) {
    auto result = run_steps(s, microbatches, 0.1);
    if (s.pp_rank() != 0)
      return;
    steps = std::move(result);
    auto now = s.internals().communication();
    through_arena = handled(now, per_node == 0 ? comm_stage::d2d_send
                                               : comm_stage::io_send_watcher);
  });
  CHECK(differences(steps, 1, microbatches, 0.1) == std::vector<std::string>{});
  CHECK(through_arena > 0);
}
