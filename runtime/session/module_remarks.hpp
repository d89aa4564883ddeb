#pragma once

#include <string>
#include <utility>
#include <vector>

namespace smp {

/// What the partition print says of modules: those of which the same is said
/// stand in one line.
class module_remarks {
public:
  void add(const std::string& text, std::string module);

  /// @returns "TEXT: a, b, c and 9 more", in the order of the first of each
  std::vector<std::string> lines() const;

private:
  std::vector<std::pair<std::string, std::vector<std::string>>> by_text_;
};

} // namespace smp
