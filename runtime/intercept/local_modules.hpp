#pragma once

#include "runtime/calls/module_runner.hpp"

#include <cstddef>
#include <cstdint>
#include <set>

namespace smp {

class local_modules;
class model_map;
struct model_context;

/// A call of this rank's module with packed arguments: its holder can run it in
/// another way than directly, or once more.
struct packed_call {
  local_modules& modules;
  module_id module;
  const call_target& target;
  const std::vector<value>& args;
  /// See `model_map::recomputed`; 0: none, or no backward can come.
  uint32_t region = 0;
  /// Interceptors from this place inwards have not seen the call yet.
  size_t next = 0;
};

/// Runs calls of this rank's modules: hooked ones, ranges of a Sequential and
/// those of TorchScript.
class local_modules final : public module_runner {
public:
  /// @param model outlives this
  explicit local_modules(model_context& model) : model_(model) {
    // nop
  }

  // -- module_runner ----------------------------------------------------------

  invocation run(module_id module, const call_target& x, unpacker& in,
                 const std::vector<value>& args, packer& out) override;

  call_result call(module_id module, const call_target& x, const packer& in,
                   const std::vector<value>& args) override;

  // -- for interceptors -------------------------------------------------------

  const model_map& map() const noexcept;

  /// Runs `x`, if it is in a region through the interceptors that have not seen
  /// it, and finally as it is: autograd then saves what it needs.
  /// @param in the tensors that `x.args` refer to
  invocation run_inside(packed_call x, unpacker& in, packer& out);

  /// Tells whether calls of a region write into their arguments, as far as
  /// known: true before the first call.
  bool may_write(uint32_t region) const {
    return !known_.contains(region) || writing_.contains(region);
  }

  void note_written(uint32_t region, bool written) {
    known_.insert(region);
    if (written)
      writing_.insert(region);
  }

private:
  uint32_t region_of(module_id module, const call_target& x) const;
  size_t end_of_region(module_id module, const call_target& x) const;
  invocation run_code(module_id module, const call_target& x, unpacker& in,
                      const std::vector<value>& args, packer& out);

  model_context& model_;
  /// Regions that had a call, and those that wrote into their arguments.
  std::set<uint32_t> known_, writing_;
};

} // namespace smp
