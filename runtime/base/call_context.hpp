#pragma once

#include "transport/bytes.hpp"

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

namespace c10 {
struct InferenceMode;
} // namespace c10

namespace smp {

/// What the thread of a caller says about how to compute. A module on another
/// rank must compute as if it were called there, so it travels with the call.
struct call_context {
  struct autocast_entry {
    c10::DeviceType device = c10::kCPU;
    c10::ScalarType dtype = c10::kFloat;
  };

  bool grad = true;
  bool inference = false;
  /// Device types for which autocast is on.
  std::vector<autocast_entry> autocast;

  /// @returns that of the calling thread.
  static call_context current();

  void write(byte_writer& out) const;

  /// @throws error (protocol)
  static call_context read(byte_reader& in);
};

/// Puts the calling thread into a context. The cache of autocast is off in it:
/// it belongs to the process and would give one microbatch what another one has
/// cast, perhaps without a graph. Each use of a weight casts it anew.
class scoped_context {
public:
  explicit scoped_context(const call_context& x);
  ~scoped_context();
  scoped_context(const scoped_context&) = delete;
  scoped_context& operator=(const scoped_context&) = delete;

private:
  void set_autocast(const std::vector<call_context::autocast_entry>& xs);

  std::vector<call_context::autocast_entry> before_;
  std::vector<call_context::autocast_entry> dtypes_;
  bool cache_before_;
  bool grad_before_;
  std::unique_ptr<c10::InferenceMode> inference_;
};

} // namespace smp
