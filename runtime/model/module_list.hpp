#pragma once

#include "runtime/model/module_walk.hpp"

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace smp {

/// Modules as a configuration lists them: by names in which `*` matches any
/// text ("encoder.*"), each with everything below it. An entry that begins with
/// `!` excludes what the entries before it include: the last entry that matches
/// a module, or one above it, decides.
class module_list {
public:
  /// Both arguments outlive this.
  module_list(const walked_model& model,
              const std::vector<std::string>& entries);

  /// @param key the configuration key of the list
  /// @throws error (config) naming an entry that matches no module, or
  /// that excludes nothing
  void check(const std::string& key) const;

  bool contains(uint32_t module) const;

  /// @returns the entry that excludes the module; null if none does
  const std::string* left_out_by(uint32_t module) const;

  /// @returns positions of the entries that match the module itself, and not
  /// only one above it; without those that exclude it
  std::vector<size_t> naming(uint32_t module) const;

private:
  struct use {
    std::optional<uint32_t> module; // the first one that it matches
    bool does_something = false;
  };

  const walked_model& model_;
  const std::vector<std::string>& entries_;
  std::vector<use> uses_;                // by entry
  std::vector<const std::string*> last_; // a match, by module; null: none
};

} // namespace smp
