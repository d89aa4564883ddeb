#include "runtime/base/vector_math.hpp"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/acos.h>
#include <ATen/ops/asin.h>
#include <ATen/ops/atan.h>
#include <ATen/ops/ceil.h>
#include <ATen/ops/cos.h>
#include <ATen/ops/cosh.h>
#include <ATen/ops/erf.h>
#include <ATen/ops/erfc.h>
#include <ATen/ops/erfinv.h>
#include <ATen/ops/exp.h>
#include <ATen/ops/expm1.h>
#include <ATen/ops/log.h>
#include <ATen/ops/log10.h>
#include <ATen/ops/log1p.h>
#include <ATen/ops/log2.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/sin.h>
#include <ATen/ops/sinh.h>
#include <ATen/ops/sqrt.h>
#include <ATen/ops/tan.h>
#include <ATen/ops/tanh.h>
#include <ATen/ops/trunc.h>

#include <mutex>

namespace smp {

void warm_up_vector_math() {
  static std::once_flag once;
  std::call_once(once, [] {
    using function = at::Tensor (*)(const at::Tensor&);
    // What aten/src/ATen/cpu/vml.h passes to MKL.
    constexpr function all[] = {
      at::acos, at::asin,  at::atan, at::ceil, at::cos,    at::cosh,
      at::erf,  at::erfc,  at::exp,  at::log,  at::erfinv, at::expm1,
      at::sin,  at::log10, at::sinh, at::log2, at::log1p,  at::sqrt,
      at::tan,  at::tanh,  at::trunc};
    at::NoGradGuard no_grad;
    for (auto type : {at::kFloat, at::kDouble}) {
      auto x = at::ones({1}, at::TensorOptions{at::kCPU}.dtype(type));
      for (auto f : all)
        f(x);
    }
  });
}

} // namespace smp
