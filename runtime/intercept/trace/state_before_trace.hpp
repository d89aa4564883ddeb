#pragma once

#include "runtime/base/random_stream.hpp"
#include "runtime/model/module_facts.hpp"

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace smp {

struct walked_model;

/// The state of a model and of the generators before a trace, which is put back
/// at its end.
class state_before_trace {
public:
  /// @param x random numbers of the microbatch
  /// @param device of the rank
  state_before_trace(const walked_model& model, random_stream x,
                     c10::Device device);
  ~state_before_trace();

  state_before_trace(const state_before_trace&) = delete;
  state_before_trace& operator=(const state_before_trace&) = delete;

  /// Undoes what a pass did.
  void restore();

  /// @returns the tensors that any pass changed, by position in the walk
  const std::set<uint32_t>& changed() const noexcept {
    return changed_;
  }

  /// @returns the modules that changed attributes, and which
  const std::map<uint32_t, std::string>& stateful() const noexcept {
    return stateful_;
  }

private:
  struct saved_tensor {
    at::Tensor tensor;
    at::Tensor copy;
    uint32_t position = 0;                // in the walk
    bool has_version = true;              // that writes change
    std::optional<uint32_t> same_at = {}; // version with the content of `copy`
  };

  static bool is_same(saved_tensor& x);
  static at::Tensor copy_of(const at::Tensor& x, bool written);

  std::vector<saved_tensor> tensors_;
  std::set<uint32_t> changed_;
  /// By position of the module.
  std::vector<std::pair<uint32_t, std::unique_ptr<kept_attributes>>>
    attributes_;
  std::map<uint32_t, std::string> stateful_;
  /// The microbatch's stream while the trace is not running, the process's
  /// while it is.
  random_stream mine_;
  const random_stream stream_; // of the microbatch, at its begin
  language_generators::state language_;
  at::Generator gpu_generator_;
  at::Tensor gpu_stream_;
};

} // namespace smp
