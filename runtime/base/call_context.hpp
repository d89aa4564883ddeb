#pragma once

#include "transport/bytes.hpp"

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

namespace c10 {
struct InferenceMode;
} // namespace c10

namespace smp {

/// A caller's thread-local settings that determine how to compute. A module on
/// another rank must compute as if called locally, so they go with the call.
struct call_context {
  struct autocast_entry {
    c10::DeviceType device = c10::kCPU;
    c10::ScalarType dtype = c10::kFloat;
    bool operator==(const autocast_entry&) const = default;
  };

  bool grad = true;
  bool inference = false;
  /// Device types for which autocast is on.
  std::vector<autocast_entry> autocast;

  /// @returns the context of the calling thread.
  static call_context current();

  bool operator==(const call_context&) const = default;
};

bool has_autocast(c10::DeviceType x);

template <class Inspector>
bool inspect(Inspector& f, call_context::autocast_entry& x) {
  auto device = [&x] { return static_cast<uint8_t>(x.device); };
  auto set_device = [&x](uint8_t y) {
    x.device = static_cast<c10::DeviceType>(y);
    return has_autocast(x.device);
  };
  auto dtype = [&x] { return static_cast<uint8_t>(x.dtype); };
  auto set_dtype = [&x](uint8_t y) {
    x.dtype = static_cast<c10::ScalarType>(y);
    return y < c10::NumScalarTypes && c10::isFloatingType(x.dtype);
  };
  return f.object(x).fields(f.field("device type", device, set_device),
                            f.field("dtype", dtype, set_dtype));
}

template <class Inspector>
bool inspect(Inspector& f, call_context& x) {
  return f.object(x).fields(f.field("grad", x.grad),
                            f.field("inference", x.inference),
                            f.field("autocast", x.autocast));
}

/// Puts the calling thread into a context, with the autocast cache off: the
/// cache belongs to the process and would hand one microbatch the casts of
/// another, perhaps without a graph. So each use of a weight casts it anew.
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
