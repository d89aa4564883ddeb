#include "runtime/intercept/trace/state_before_trace.hpp"

#include "runtime/base/copied_on_write.hpp"
#include "runtime/model/module_walk.hpp"

#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/equal.h>

#include <exception>

namespace smp {

state_before_trace::state_before_trace(const walked_model& model,
                                       random_stream x, c10::Device device)
  : mine_(std::move(x)), stream_(mine_) {
  at::NoGradGuard no_grad;
  for (uint32_t i = 0; i < model.tensors.size(); ++i) {
    auto& x = model.tensors[i];
    if (!x.tensor.defined() || !x.tensor.has_storage())
      continue;
    auto written = x.is_buffer || x.is_attribute;
    tensors_.push_back({x.tensor, copy_of(x.tensor, written), i,
                        !written && !x.tensor.is_inference()});
  }
  for (uint32_t i = 0; i < model.modules.size(); ++i)
    if (auto x = model.modules[i].facts->keep_attributes())
      attributes_.push_back({i, std::move(x)});
  if (auto* x = watched_generators())
    language_ = x->now();
  mine_.swap_with_default();
  if (!device.is_cpu()) {
    gpu_generator_ = at::globalContext().defaultGenerator(device);
    gpu_stream_ = gpu_generator_.get_state();
  }
}

state_before_trace::~state_before_trace() {
  try {
    restore();
  } catch (const std::exception&) {
    // The error that ended the trace tells more.
  }
  mine_.swap_with_default();
}

void state_before_trace::restore() {
  at::NoGradGuard no_grad;
  for (auto& x : tensors_) {
    // A mask may grow with its input.
    auto remade = x.tensor.sizes() != x.copy.sizes()
                  || x.tensor.scalar_type() != x.copy.scalar_type();
    if (!remade && is_same(x))
      continue;
    changed_.insert(x.position);
    if (remade)
      x.tensor.set_data(x.copy.to(x.tensor.device(), false, true));
    else
      x.tensor.copy_(x.copy);
  }
  for (auto& [module, kept] : attributes_)
    if (auto what = kept->changes(); !what.empty())
      stateful_.emplace(module, std::move(what));
  for (auto& [module, kept] : attributes_)
    kept->put_back(nullptr);
  if (auto* x = watched_generators())
    x->end_trace(language_);
  auto again = stream_;
  again.swap_with_default();
  if (gpu_stream_.defined())
    gpu_generator_.set_state(gpu_stream_);
}

bool state_before_trace::is_same(saved_tensor& x) {
  if (x.tensor.device() == x.copy.device())
    // A copy-on-write tensor without writes still shares its bytes.
    return x.tensor.const_data_ptr() == x.copy.const_data_ptr()
           || at::equal(x.tensor, x.copy);
  // From a device it takes a copy, so one that was the same is asked for its
  // version only.
  if (x.has_version && x.same_at == x.tensor._version())
    return true;
  if (!at::equal(x.tensor.to(x.copy.device()), x.copy))
    return false;
  if (x.has_version)
    x.same_at = x.tensor._version();
  return true;
}

/// Parameters are rarely written and may fill the memory, so they are copied on
/// write. Batch norm writes its buffers in a way that no version counter shows.
at::Tensor state_before_trace::copy_of(const at::Tensor& x, bool written) {
  auto result = written ? at::Tensor{} : copied_on_write(x);
  return result.defined() ? result : x.detach().clone();
}

} // namespace smp
