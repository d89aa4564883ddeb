#pragma once

#include <string>
#include <vector>

namespace smp {

/// Remarks of the partition print about modules; modules with the same remark
/// share one line.
class partition_notes {
public:
  struct remark {
    std::string text;
    /// Empty for a remark about the whole model.
    std::vector<std::string> modules;
    /// Shown only in the detailed print.
    bool detail = false;
  };

  void add(const std::string& text, std::string module, bool detail = false);

  /// Adds a remark about the whole model.
  void add(const std::string& text);

  /// @returns "TEXT: a, b, c and 9 more", ordered by first occurrence
  /// @param all list all names, and include detail remarks
  std::vector<std::string> lines(bool all = false) const;

  const std::vector<remark>& all() const noexcept {
    return by_text_;
  }

private:
  remark& find(const std::string& text, bool detail);

  std::vector<remark> by_text_;
};

} // namespace smp
