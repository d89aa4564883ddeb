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

/// Which modules tensor-parallel ranks are to share, as code and configuration
/// say.
class sharing_wishes {
public:
  /// All of them outlive this.
  /// @param marked what code says of modules, by object
  /// @param patterns names of modules (tensor_parallel.modules)
  sharing_wishes(const walked_model& model,
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

  /// Why ranks may not share a part of a module together with that; empty if
  /// they may.
  std::string why_kept_out(uint32_t part, uint32_t whole) const;

  /// Tells whether code says that the module is not to be shared.
  bool forbidden(uint32_t module) const {
    return by_code(module) == false;
  }

  /// Tells whether the module is wanted for itself, and not for what is above
  /// it or for what many are called.
  bool named(uint32_t module) const;

  /// Whether no activation of the module is to be kept twice: as code says of
  /// it, or of the nearest one above it of which it does.
  bool saves_memory(uint32_t module, bool otherwise) const;

private:
  std::optional<bool> by_code(uint32_t module) const;

  const walked_model& model_;
  const std::map<const void*, sharing_mark>& marked_;
  const std::vector<std::string>& patterns_;
  module_list list_;
};

} // namespace smp
