#include "tests/simulated/backend/composed.hpp"
#include "tests/simulated/backend/copies.hpp"
#include "tests/simulated/backend/creation.hpp"
#include "tests/simulated/backend/fallback.hpp"

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

// Which operators the device has of its own.

namespace smp::sim {

namespace {

at::Tensor view(const at::Tensor& x, at::IntArrayRef size) {
  return at::native::view(x, size);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  using torch::CppFunction;
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage_storage_offset", set_storage_and_shape);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_", set_nothing);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("view_as_real", at::native::view_as_real);
  m.impl("view_as_complex", at::native::view_as_complex);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("record_stream", record_stream);
  m.impl("_has_compatible_shallow_copy_type", has_compatible_type);
  m.impl("native_dropout", native_dropout);
  m.impl("convolution_overrideable",
         CppFunction::makeFromBoxedFunction<&convolution>());
  m.impl("convolution_backward_overrideable",
         CppFunction::makeFromBoxedFunction<&convolution_backward>());
  // Else it is made of other operators, which round differently.
  m.impl("native_layer_norm", CppFunction::makeFromBoxedFunction<&fallback>());
  // A kernel of its own, as CUDA has one.
  for (auto* name :
       {"_fused_adam_", "_fused_adamw_", "_fused_adagrad_", "_fused_sgd_"})
    m.impl(name, CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) {
  m.impl("_thnn_fused_lstm_cell", lstm_cell);
  m.impl("_thnn_fused_gru_cell", gru_cell);
}

} // namespace

// -- autocast: the lists of all devices ---------------------------------------

namespace autocast {

using namespace at::autocast;

#define SMP_SIM_LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define SMP_SIM_FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define SMP_SIM_DTYPE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define SMP_SIM_PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  AT_FORALL_LOWER_PRECISION_FP(SMP_SIM_LOWER)
  AT_FORALL_FP32(SMP_SIM_FP32)
  AT_FORALL_FP32_SET_OPT_DTYPE(SMP_SIM_DTYPE)
  AT_FORALL_PROMOTE(SMP_SIM_PROMOTE)
}

} // namespace autocast

} // namespace smp::sim
