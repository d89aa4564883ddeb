#include "tests/support/catch.hpp"

#include "runtime/device/cuda_driver.hpp"
#include "tests/support/runs/program.hpp"

#include <chrono>
#include <cstdlib>
#include <string>
#include <vector>

#include <dlfcn.h>

// Looking for GPUs, with a driver that answers as these tests want
// (tests/no_driver).

using namespace smp;

namespace {

struct answers {
  std::string version;
  std::string gpus;
  std::string init;
};

cuda_driver ask(const answers& x) {
  ::unsetenv("SMP_CUDA");
  ::setenv("SMP_TEST_CUDA_VERSION", x.version.c_str(), 1);
  ::setenv("SMP_TEST_CUDA_GPUS", x.gpus.c_str(), 1);
  ::setenv("SMP_TEST_CUDA_INIT", x.init.c_str(), 1);
  auto library = test::built_program("../lib/smp_no_driver.so");
  auto* loaded = ::dlopen(library.c_str(), RTLD_NOW);
  INFO(library);
  REQUIRE(loaded != nullptr);
  auto result = ask_cuda_driver(x.init == "hang"
                                  ? std::chrono::milliseconds{200}
                                  : std::chrono::milliseconds{60'000});
  ::dlclose(loaded);
  return result;
}

} // namespace

TEST_CASE("A driver says which GPUs there are", "[device][cuda]") {
  auto x = ask({"13000", "2", ""});
  CHECK(x.problem.empty());
  CHECK(x.version == 13000);
  REQUIRE(x.gpus.size() == 2);
  CHECK(x.gpus[1].name == "GPU of tests 1");
  CHECK(x.gpus[1].memory == 2000000);
}

TEST_CASE("A driver that is of no use is described", "[device][cuda]") {
  using Catch::Matchers::ContainsSubstring;
  struct row {
    answers driver;
    std::string problem;
  };
  auto x = GENERATE(values<row>({
    {{"12040", "2", ""}, "is made for CUDA 12.4, and 13.0 is needed"},
    {{"13000", "0", ""}, "sees no GPU"},
    {{"13000", "2", "100"}, "sees no GPU"},
    {{"13000", "2", "999"}, "error 999, an error of tests"},
    {{"13000", "2", "hang"}, "did not answer for 0.2 s"},
    {{"13000", "2", "abort"}, "ends the process that asks"},
  }));
  auto driver = ask(x.driver);
  CHECK_THAT(driver.problem, ContainsSubstring(x.problem));
  CHECK(driver.gpus.empty());
}
