#include "runtime/train/half_on_cpu.hpp"

#include <ATen/core/dispatch/Dispatcher.h>

#include <fmt/format.h>

namespace smp {

std::string remark_on_half_precision(c10::ScalarType x) {
  const auto bf16 = x == c10::ScalarType::BFloat16;
  if (!bf16 && x != c10::ScalarType::Half)
    return {};
  auto found = c10::Dispatcher::singleton().findSchema(
    {bf16 ? "mkldnn::_is_mkldnn_bf16_supported"
          : "mkldnn::_is_mkldnn_fp16_supported",
     ""});
  if (found && found->typed<bool()>().call())
    return {};
  return fmt::format(
    "{}, for which this CPU has no instructions: a step may "
    "take a hundred times as long as in float32",
    bf16 ? "bfloat16" : "float16");
}

} // namespace smp
