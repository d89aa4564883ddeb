#pragma once

// The state of a conversion between C++ and values: the tensors, and the place
// in the arguments, for errors.

#include "runtime/values/value.hpp"

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace smp {

/// The path from the root of a value tree to the part being converted, for
/// error texts: "argument 1, item 3".
class value_path {
public:
  /// Enters a part of the tree for the life of this object.
  class scope {
  public:
    /// @param index nullopt: there is only one `what`
    scope(value_path& path, const char* what, std::optional<size_t> index = {})
      : path_(path) {
      path_.places_.push_back({what, index});
    }

    ~scope() {
      path_.places_.pop_back();
    }

    scope(const scope&) = delete;
    scope& operator=(const scope&) = delete;

  private:
    value_path& path_;
  };

  /// Parts entered so far.
  size_t depth() const noexcept {
    return places_.size();
  }

  /// @returns "argument 1, item 3", or "value" at the root.
  std::string place() const;

  /// @throws error (unsupported) "PLACE: WHY"
  [[noreturn]] void refuse(const std::string& why) const;

  /// @throws error (protocol) "PLACE: WHY"
  [[noreturn]] void fail(const std::string& why) const;

  /// @throws error (protocol) "PLACE: EXPECTED expected, found KIND"
  [[noreturn]] void mismatch(const char* expected, const value& found) const;

private:
  struct entry {
    const char* what;
    std::optional<size_t> index;
  };

  std::vector<entry> places_;
};

/// Collects the tensors of a message while its values are made.
class packer : public value_path {
public:
  packer() = default;

  /// @returns the position of `x` in the tensor table. One TensorImpl has one
  ///          position, so that it is sent once and arrives as one.
  /// @pre x.defined()
  uint32_t add(const at::Tensor& x);

  const std::vector<at::Tensor>& tensors() const noexcept {
    return tensors_;
  }

private:
  std::vector<at::Tensor> tensors_;
  std::unordered_map<const void*, uint32_t> positions_;
};

/// Holds the tensors of a message while its values are read.
class unpacker : public value_path {
public:
  explicit unpacker(std::vector<at::Tensor> xs) : tensors_(std::move(xs)) {
    // nop
  }

  /// @throws error (protocol) if the message has no such tensor
  const at::Tensor& tensor(uint32_t index) const;

  const std::vector<at::Tensor>& tensors() const noexcept {
    return tensors_;
  }

private:
  std::vector<at::Tensor> tensors_;
};

} // namespace smp
