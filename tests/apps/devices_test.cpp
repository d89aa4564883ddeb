// ctest: seconds=20 processors=2
#include "tests/support/catch.hpp"

#include "tests/support/runs/train_dir.hpp"

#include <chrono>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

// Processes that compute on simulated devices.

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

/// The first steps of the quickstart.
program quickstart(const train_dir& dir, const std::string& device,
                   const std::map<std::string, std::string>& environment) {
  return dir.start({source_file("config/quickstart.toml"), "--train.steps=2",
                    "--train.eval_steps=1", "--train.sample=8",
                    "--smp.device=" + device, "--run-dir=" + device},
                   environment);
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
  auto on_host = quickstart(dir, "cpu", {});
  finish(on_host);
  auto on_device = quickstart(dir, "sim", simulated_devices());
  finish(on_device);
  auto host = dir.metrics("cpu");
  auto device = dir.metrics("sim");
  REQUIRE(host.size() == 2);
  REQUIRE(device.size() == 2);
  for (auto* key : {"loss", "grad_norm"})
    for (size_t i = 0; i < 2; ++i)
      CHECK(device[i][key].get<double>()
            == Catch::Approx(host[i][key].get<double>()).epsilon(1e-5));
  CHECK(device[1]["held_out_loss"].get<double>()
        == Catch::Approx(host[1]["held_out_loss"].get<double>()).epsilon(1e-5));
}
