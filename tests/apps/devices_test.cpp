// ctest: seconds=80 processors=2
#include "tests/support/catch.hpp"

#include "tests/support/runs/train_dir.hpp"

#include <nlohmann/json.hpp>

#include <chrono>
#include <csignal>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

// Processes that compute on simulated devices.

using Catch::Matchers::ContainsSubstring;
using namespace smp::test;

namespace {

/// Late kernels, poisoned memory, and exit code 97 after an access that nothing
/// orders.
std::map<std::string, std::string> simulated_devices() {
  auto library = built_program("../lib/smp_simulated_device.so");
  return {{"LD_PRELOAD", std::filesystem::canonical(library)},
          {"SMP_SIM_CHECK", "1"},
          {"SMP_SIM_POISON", "1"},
          {"SMP_SIM_DELAY_US", "20"}};
}

/// A driver that answers so (tests/no_driver).
std::map<std::string, std::string> driver(const std::string& version,
                                          const std::string& gpus) {
  return {{"LD_PRELOAD", std::filesystem::canonical(
                           built_program("../lib/smp_no_driver.so"))},
          {"SMP_CUDA", ""},
          {"SMP_TEST_CUDA_VERSION", version},
          {"SMP_TEST_CUDA_GPUS", gpus}};
}

/// The first steps of the quickstart: the batch of the third is copied while
/// the second runs.
program quickstart(const train_dir& dir, const std::string& device,
                   const std::map<std::string, std::string>& environment,
                   const std::vector<std::string>& more = {}) {
  std::vector<std::string> command{source_file("config/quickstart.toml"),
                                   "--train.steps=3",
                                   "--train.eval_steps=1",
                                   "--train.sample=8",
                                   "--smp.device=" + device,
                                   "--run-dir=" + device};
  command.insert(command.end(), more.begin(), more.end());
  return dir.start(command, environment);
}

void finish(program& x) {
  auto code = x.join(std::chrono::minutes{3});
  INFO(x.output());
  REQUIRE(code == 0);
}

} // namespace

TEST_CASE("The quickstart has the losses of the host on devices",
          "[apps][train][device]") {
  train_dir dir{""};
  auto on_host = quickstart(
    dir, "cpu", {}, {"--smp.offload_optimizer=true"}); // as it is anyway
  finish(on_host);
  auto host = dir.metrics("cpu");
  REQUIRE(host.size() == 3);
  CHECK_FALSE(host[0].contains("device"));
  uint64_t most = 0; // on a device with the optimizer
  // Through memory of the devices, and where they do not reach each other, and
  // without the optimizer.
  for (auto* alone : {"0", "1"}) {
    CAPTURE(alone);
    auto environment = simulated_devices();
    environment["SMP_SIM_NO_PEERS"] = alone;
    const auto offloads = alone == std::string{"1"};
    auto on_device = quickstart(dir, "sim", environment,
                                {std::string{"--smp.offload_optimizer="}
                                 + (offloads ? "true" : "false")});
    finish(on_device);
    CHECK((on_device.output().find("  on host\n") != std::string::npos)
          == offloads);
    auto device = dir.metrics("sim");
    REQUIRE(device.size() == 3);
    for (auto* key : {"loss", "grad_norm"})
      for (size_t i = 0; i < 3; ++i)
        CHECK(device[i][key].get<double>()
              == Catch::Approx(host[i][key].get<double>()).epsilon(1e-5));
    CHECK(
      device[2]["held_out_loss"].get<double>()
      == Catch::Approx(host[2]["held_out_loss"].get<double>()).epsilon(1e-5));
    CHECK(device[0]["device"] == nlohmann::json{"sim:0", "sim:1"});
    for (size_t i = 0; i < 3; ++i)
      for (size_t rank = 0; rank < 2; ++rank) {
        auto number = [&](const char* key) {
          return device[i][key].at(rank).get<uint64_t>();
        };
        CHECK(number("device_memory") > 1'000'000);
        CHECK(number("device_memory") < number("device_peak_memory"));
        CHECK(number("device_peak_memory") < number("device_total_memory"));
        CHECK(number("device_total_memory") == uint64_t{1} << 30);
      }
    // Two tensors of the size of the parameters.
    auto now = device[1]["device_memory"].at(0).get<uint64_t>();
    if (offloads)
      CHECK(now < most - 10'000'000);
    most = now;
    std::filesystem::remove_all(dir.path / "sim");
  }
}

TEST_CASE("Replicas and ranks that share modules add up on devices as on hosts",
          "[apps][train][device]") {
  using options = std::vector<std::string>;
  auto more = GENERATE(
    options{"--smp.shard_optimizer_state=true", "--smp.shard_gradients=true"},
    options{"--smp.tensor_parallel_degree=2"});
  for (auto* x :
       {"--ranks=2", "--smp.pipeline_parallel_degree=1", "--smp.ddp=true"})
    more.emplace_back(x);
  CAPTURE(more);
  train_dir dir{""};
  auto on_host = quickstart(dir, "cpu", {}, more);
  finish(on_host);
  auto on_device = quickstart(dir, "sim", simulated_devices(), more);
  finish(on_device);
  auto host = dir.metrics("cpu");
  auto device = dir.metrics("sim");
  REQUIRE(host.size() == 3);
  REQUIRE(device.size() == 3);
  for (auto* key : {"loss", "grad_norm"})
    for (size_t i = 0; i < 3; ++i)
      CHECK(device[i][key].get<double>()
            == Catch::Approx(host[i][key].get<double>()).epsilon(1e-6));
}

TEST_CASE("Devices that fail end a run of replicas by name",
          "[apps][train][device]") {
  train_dir dir{""};
  auto environment = simulated_devices();
  environment["SMP_SIM_FAIL_KERNEL"] = "1500";
  // Through memory of the devices, and where they do not reach each other.
  environment["SMP_SIM_NO_PEERS"] = GENERATE("0", "1");
  auto run = quickstart(
    dir, "sim", environment,
    {"--ranks=2", "--smp.pipeline_parallel_degree=1", "--smp.ddp=true"});
  auto code = run.join(std::chrono::minutes{1});
  INFO(run.output());
  CHECK(code == 3);
  CHECK_THAT(run.output(), ContainsSubstring("rank ")
                             && ContainsSubstring("has failed")
                             && ContainsSubstring("smp.wait_for_device"));
}

TEST_CASE("A rank that is killed while others read its device ends the run",
          "[apps][train][device]") {
  train_dir dir{""};
  auto environment = simulated_devices();
  environment["SMP_SIM_DELAY_US"] = "2000";
  auto run = dir.start({source_file("config/quickstart.toml"),
                        "--train.log_interval=1", "--train.eval_steps=0",
                        "--smp.device=sim", "--run-dir=run"},
                       environment);
  REQUIRE(run.wait_for(" 1/100"));
  ::kill(dir.process_of(1), SIGKILL);
  auto code = run.join(std::chrono::seconds{30});
  INFO(run.output());
  CHECK(code == 3);
  CHECK_THAT(run.output(), ContainsSubstring("rank 1"));
}

TEST_CASE("A rank without memory on its device says what it needs",
          "[apps][train][device]") {
  train_dir dir{""};
  auto environment = simulated_devices();
  // For the part of the model that it owns, or for what training adds.
  auto capacity = GENERATE("4", "24");
  CAPTURE(capacity);
  environment["SMP_SIM_CAPACITY"] = capacity;
  auto run = quickstart(dir, "sim", environment);
  auto code = run.join(std::chrono::minutes{2});
  INFO(run.output());
  CHECK(code == 3);
  CHECK_THAT(run.output(),
             ContainsSubstring("out of memory")
               && ContainsSubstring("this rank needs")
               && ContainsSubstring("; smp.offload_optimizer = true takes "));
  CHECK((run.output().find("; what helps is more pipeline ranks, ")
         != std::string::npos)
        == (capacity == std::string{"4"}));
}

TEST_CASE("A driver that is too old is refused by name, or not used",
          "[apps][train][device]") {
  train_dir dir{""};
  auto old = driver("12040", "1");
  auto refused = quickstart(dir, "cuda", old);
  auto code = refused.join();
  INFO(refused.output());
  CHECK(code == 2);
  CHECK_THAT(refused.output(),
             ContainsSubstring("smp.device = 'cuda': the NVIDIA driver is made "
                               "for CUDA 12.4, and 13.0 is needed"));
  auto trained = quickstart(dir, "auto", old);
  finish(trained);
  const std::string remark
    = "smp: this computes on the CPU: the NVIDIA driver "
      "is made for CUDA 12.4";
  auto text = trained.output();
  INFO(text);
  CHECK(text.find(remark) != text.npos);
  CHECK(text.find(remark) == text.rfind(remark));
}

TEST_CASE("What LibTorch has for GPUs is loaded, or said to be missing",
          "[apps][train][device]") {
  train_dir dir{""};
  auto run = quickstart(dir, "auto", {{"SMP_CUDA", "1"}});
  finish(run);
  INFO(run.output());
  auto says = [&](const char* x) {
    return run.output().find(x) != std::string::npos;
  };
  // On a machine with a GPU it trains there.
  CHECK((says("libtorch_cuda.so is not there") || says("no NVIDIA driver")
         || says("cuda:0")));
}

TEST_CASE("check tells which rank would get which GPU",
          "[apps][train][device]") {
  train_dir dir{tiny_gpt(2, 2, 4, "[train]\nsteps = 1\n")};
  auto check = [&](std::map<std::string, std::string> environment) {
    return dir
      .start(
        {"check", "tiny.toml", "--ranks=4", "--smp.offload_optimizer=true"},
        environment)
      .finish();
  };
  CHECK_THAT(check(driver("13000", "2")),
             ContainsSubstring("devices: 4 ranks on cuda\n"
                               "  cuda:0  GPU of tests 0, 0.0 GB: ranks 0, 2\n"
                               "  cuda:1  GPU of tests 1, 0.0 GB: ranks 1, 3\n")
               && ContainsSubstring("   on host\n"));
  CHECK_THAT(check({}), ContainsSubstring("devices: 4 ranks on cpu: ")
                          && !ContainsSubstring("on host\n"));
}

TEST_CASE("A run on devices says while it runs where, and what memory it uses",
          "[apps][inspect][device]") {
  train_dir dir{endless_gpt()};
  auto run = dir.start({"tiny.toml", "--run-dir", "run",
                        "--smp.trace_device=none", "--smp.device=sim"},
                       simulated_devices());
  REQUIRE(run.wait_for(" 2/1000000"));
  CHECK_THAT(run.output(), ContainsSubstring(
                             "  device    ranks 0, 1: sim:0, 1 (1.1 GB each)"));
  // Whoever is late for a moment is something wrong at that moment.
  auto ask = [&](std::vector<std::string> command) {
    command[0] = built_program(command[0]);
    auto end = std::chrono::steady_clock::now() + std::chrono::minutes{1};
    for (;;) {
      program x{command, dir.path};
      if (x.join() == 0 || std::chrono::steady_clock::now() > end)
        return x.output();
    }
  };
  CHECK_THAT(ask({"smp-inspect", "run", "actor", "r1"}),
             ContainsSubstring("device        sim:1 (")
               && ContainsSubstring(" at most, of 1.07 GB)"));
  auto top = nlohmann::json::parse(ask({"smp-top", "run", "--once", "--json"}));
  for (size_t rank = 0; rank < 2; ++rank) {
    auto& x = top.at("ranks").at(rank);
    CHECK(x.at("device") == "sim:" + std::to_string(rank));
    auto used = x.at("device_memory").get<uint64_t>();
    auto peak = x.at("device_peak_memory").get<uint64_t>();
    CHECK(used > 0);
    CHECK(used <= peak);
    CHECK(peak < x.at("device_total_memory").get<uint64_t>());
  }
  run.signal(SIGINT);
  CHECK(run.join() == 130);
}
