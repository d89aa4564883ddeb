#pragma once

#include <string>
#include <vector>

namespace smp {

/// What the partition print says of modules: those of which the same is said
/// stand in one line.
class module_remarks {
public:
  struct remark {
    std::string text;
    /// None if it is said of the model.
    std::vector<std::string> modules;
    /// It is only for those who want to know all.
    bool detail = false;
  };

  void add(const std::string& text, std::string module, bool detail = false);

  /// Says it of the model.
  void add(const std::string& text);

  /// @returns "TEXT: a, b, c and 9 more", in the order of the first of each
  /// @param all with all names, and what is only for those who want to know
  std::vector<std::string> lines(bool all = false) const;

  const std::vector<remark>& all() const noexcept {
    return by_text_;
  }

private:
  remark& find(const std::string& text, bool detail);

  std::vector<remark> by_text_;
};

} // namespace smp
