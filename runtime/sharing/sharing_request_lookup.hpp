#pragma once

#include "runtime/model/hook.hpp"
#include "runtime/model/module_list.hpp"
#include "runtime/model/module_walk.hpp"

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace smp {

/// Which modules tensor-parallel ranks should share, as user code and the
/// configuration request.
class sharing_request_lookup {
public:
  /// All arguments outlive this.
  /// @param marked the marks of user code, by object
  /// @param patterns names of modules (tensor_parallel.modules)
  sharing_request_lookup(const walked_model& model,
                         const std::map<const void*, sharing_mark>& marked,
                         const std::vector<std::string>& patterns)
    : model_(model),
      marked_(marked),
      patterns_(patterns),
      list_(model, patterns) {
    // nop
  }

  const module_list& list() const noexcept {
    return list_;
  }

  bool wanted(uint32_t module) const;

  /// Why ranks may not share part of a module along with the whole; empty if
  /// they may.
  std::string why_kept_out(uint32_t part, uint32_t whole) const;

  /// Tells whether user code forbids sharing the module.
  bool forbidden(uint32_t module) const {
    return by_code(module) == false;
  }

  /// Tells whether the module itself is requested, not through an ancestor or a
  /// pattern that matches many.
  bool named(uint32_t module) const;

  /// Whether no activation of the module should be kept twice: as set for it,
  /// or for its nearest ancestor with a setting.
  bool saves_memory(uint32_t module, bool otherwise) const;

private:
  std::optional<bool> by_code(uint32_t module) const;

  const walked_model& model_;
  const std::map<const void*, sharing_mark>& marked_;
  const std::vector<std::string>& patterns_;
  module_list list_;
};

} // namespace smp
