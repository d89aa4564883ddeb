#pragma once

#include <c10/util/ArrayRef.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace smp {

/// Mistakes of one kind in a file of tensors: their number, and the first few
/// by name. A wrong file may have thousands.
class mistakes {
public:
  /// At most this many are listed by name.
  static constexpr size_t max_named = 8;

  explicit mistakes(const char* what) : what_(what) {
    // nop
  }

  void add(const std::string& name, const std::string& more = {});

  /// Appends e.g. "3 missing ('a', 'b' and 1 more)" to `result`.
  void describe(std::string& result) const;

private:
  const char* what_;
  size_t count_ = 0;
  std::vector<std::string> named_;
};

/// @returns "[2, 3]"
std::string shape_text(c10::ArrayRef<int64_t> x);

} // namespace smp
