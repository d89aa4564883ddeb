#pragma once

#include "runtime/remote/module_runner.hpp"

#include <cstddef>
#include <cstdint>
#include <set>

namespace smp {

class local_modules;
class model_map;
struct model_context;

/// A call of a module of this rank with packed arguments: who has it can run it
/// in another way than as it comes, or once more.
struct packed_call {
  local_modules& modules;
  module_id module;
  const call_target& target;
  const std::vector<value>& args;
  /// See `model_map::recomputed`; 0: none, or no backward can come.
  uint32_t region = 0;
  /// Interceptors from this place on have not heard of it.
  size_t next = 0;
};

/// Runs calls on the modules of this rank: hooked ones, ranges of a Sequential
/// and those of TorchScript.
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

  /// Runs `x` as those interceptors want that have not heard of it, and at last
  /// as it is: autograd keeps what it wants to.
  /// @param in tensors that `x.args` name
  invocation run_inside(packed_call x, unpacker& in, packer& out);

  /// Tells whether calls of a region write into their arguments, as far as is
  /// known: true before the first one.
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
  /// Regions of which a call ran, and those that wrote into their arguments.
  std::set<uint32_t> known_, writing_;
};

} // namespace smp
