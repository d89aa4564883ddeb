#pragma once

#include "runtime/model/foreign_module.hpp"

#include <ATen/core/ivalue.h>

#include <cstdint>
#include <memory>
#include <unordered_set>
#include <vector>

namespace smp {

class model_map;
class script_code;

/// Saves the attributes of this rank's modules that code sets or changes, of
/// TorchScript and of other languages, as they were before a step, and restores
/// them if the step is rolled back. A list that two attributes share stays one
/// list, and a tensor stays the same tensor.
class rollback_attributes {
public:
  /// @param code of a TorchScript model; null: of any other
  void keep(const model_map& map, const script_code* code);

  /// Tells whether all of them could be saved: none is an object of a custom
  /// C++ class or of another type that cannot be copied.
  bool complete() const noexcept {
    return complete_;
  }

  /// Restores the attributes as of the last `keep`, and drops the saved ones.
  void put_back(model_map& map);

  void drop() noexcept;

private:
  void keep_slot(c10::ivalue::Object& x, size_t index);
  void keep_value(const c10::IValue& x);
  void keep_tensor(const at::Tensor& x);

  struct slot {
    c10::ivalue::Object* object = nullptr; // of the model
    size_t index = 0;
    c10::IValue value;
  };

  /// A list, or a dictionary with its keys and values alternating.
  struct container {
    c10::IValue value;
    std::vector<c10::IValue> items;
  };

  struct content {
    at::Tensor tensor;
    at::Tensor copy;
    uint32_t version = 0;
  };

  std::vector<slot> slots_;
  std::vector<std::unique_ptr<kept_attributes>> foreign_;
  std::vector<container> containers_;
  std::vector<content> tensors_;
  std::unordered_set<const void*> seen_; // objects of script classes
  bool complete_ = true;
};

} // namespace smp
