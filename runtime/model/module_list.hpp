#pragma once

#include "runtime/model/module_walk.hpp"

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace smp {

/// Modules as a configuration lists them: by names in which `*` stands for
/// anything ("encoder.*"), each with all that is below it. An entry that begins
/// with `!` takes away what those before it name: of the entries that fit a
/// module, or one above it, the last one decides.
class module_list {
public:
  /// Both outlive this.
  module_list(const walked_model& model,
              const std::vector<std::string>& entries);

  /// @param key where they stand
  /// @throws error (config) naming an entry that fits no module, or that takes
  /// nothing away
  void check(const std::string& key) const;

  bool contains(uint32_t module) const;

  /// @returns the entry that takes the module away; null if none does
  const std::string* left_out_by(uint32_t module) const;

  /// @returns positions of the entries that name the module itself, and not
  /// only one above it; without those that take it away
  std::vector<size_t> naming(uint32_t module) const;

private:
  struct use {
    std::optional<uint32_t> module; // the first one that it fits
    bool does_something = false;
  };

  const walked_model& model_;
  const std::vector<std::string>& entries_;
  std::vector<use> uses_;                // by entry
  std::vector<const std::string*> last_; // that fits, by module; null: none
};

} // namespace smp
