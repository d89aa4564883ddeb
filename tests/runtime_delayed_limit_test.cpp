// ctest: timeout=300 label=multiprocess
#include "tests/support/catch.hpp"

#include "runtime/environment.hpp"
#include "runtime/launcher.hpp"
#include "runtime/smp.hpp"
#include "tests/support/program.hpp"
#include "tests/support/scratch_dir.hpp"

#include <fmt/format.h>
#include <torch/torch.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include <malloc.h>
#include <sys/resource.h>

using namespace smp;

namespace {

void show(const char* what) {
  std::ifstream in{"/proc/self/status"};
  std::string text;
  for (std::string line; std::getline(in, line);)
    for (auto key : {"VmData", "VmHWM", "VmRSS", "RssAnon", "RssFile", "RssShmem", "Threads"})
      if (line.starts_with(key))
        text += line + "; ";
  auto m = mallinfo2();
  fmt::print(stderr, "{}: {} arena {} mmapped {} used {} free {} top {}\n", what, text,
             m.arena >> 20, m.hblkhd >> 20, m.uordblks >> 20, m.fordblks >> 20, m.keepcost >> 20);
}

struct tall_impl : torch::nn::Module {
  tall_impl(int64_t layers, int64_t width) {
    for (int64_t i = 0; i < layers; ++i)
      body->push_back(torch::nn::Linear(width, width));
    register_module("body", body);
  }
  torch::Tensor forward(torch::Tensor x) {
    return body->forward(x);
  }
  torch::nn::Sequential body;
};
TORCH_MODULE_IMPL(tall, tall_impl);

int64_t number(const char* name) {
  return std::stoll(std::getenv(name));
}

} // namespace

TEST_CASE("rank of a run under a limit", "[.rank]") {
  rlimit limit{};
  limit.rlim_cur = limit.rlim_max = number("TEST_LIMIT");
  show("start");
  if (limit.rlim_cur > 0)
    REQUIRE(::setrlimit(RLIMIT_DATA, &limit) == 0);
  session_config config;
  config.pipeline_parallel_degree = number("TEST_PP");
  config.microbatches = 2;
  config.trace_device = "none";
  config.threads = 1;
  session s{config};
  show("session");
  torch::manual_seed(1);
  auto made = [&] {
    delay_param_initialization scope{number("TEST_DELAY") != 0};
    return tall{number("TEST_LAYERS"), number("TEST_WIDTH")};
  }();
  show("created");
  if (number("TEST_FROZEN"))
    for (auto& x : made->parameters())
      x.requires_grad_(false);
  distributed_model model{made};
  auto train_step = step([&](torch::Tensor x) {
    auto loss = model(x).square().mean();
    if (loss.requires_grad())
      model.backward(loss);
    return loss.detach();
  });
  model.partition();
  show("partitioned");
  train_step(torch::ones({4, number("TEST_WIDTH")})).reduce_mean();
  show("trained");
}
