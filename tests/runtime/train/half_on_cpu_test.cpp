#include "tests/support/catch.hpp"

#include "runtime/train/half_on_cpu.hpp"
#include "tests/support/runs/program.hpp"

#include <initializer_list>
#include <string>

using namespace smp;
using namespace smp::test;
using Catch::Matchers::ContainsSubstring;

namespace {

/// Whether the kernel finds any of these in the CPU.
bool has(std::initializer_list<const char*> flags) {
  auto all = content_of("/proc/cpuinfo");
  for (std::string flag : flags)
    if (all.find(' ' + flag + ' ') != all.npos)
      return true;
  return false;
}

} // namespace

TEST_CASE("half precision without the CPU's help is remarked on",
          "[runtime][precision]") {
  CHECK(remark_on_half_precision(c10::ScalarType::Float).empty());
  CHECK(remark_on_half_precision(c10::ScalarType::Double).empty());
  auto bfloat16 = remark_on_half_precision(c10::ScalarType::BFloat16);
  auto float16 = remark_on_half_precision(c10::ScalarType::Half);
  CAPTURE(bfloat16, float16);
  if (has({"avx512_bf16", "amx_bf16"})) {
    CHECK(bfloat16.empty());
  } else if (!has({"avx512bw", "avx_ne_convert", "asimd"})) {
    CHECK_THAT(bfloat16, ContainsSubstring("bfloat16, for which this CPU"));
    CHECK_THAT(float16, ContainsSubstring("float16, for which this CPU"));
  }
}
