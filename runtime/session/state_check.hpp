#pragma once

#include "runtime/base/mistakes.hpp"

#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

namespace smp {

class model_map;

/// Compares a model with the tensors to be loaded into it, before loading any
/// of them.
class state_check {
public:
  /// @param map outlives this
  explicit state_check(const model_map& map);

  /// Registers a tensor to be loaded, under a name that may be in the model.
  /// @param plain the model can take its values
  void add(const std::string& name, c10::IntArrayRef sizes, bool plain = true);

  /// @param who begins the error: "load_state_dict", "cannot load FILE"
  /// @throws error (config) listing all mismatches, and similar names where a
  /// name is unknown
  void finish(const std::string& who);

  /// @pre there is one
  /// @returns the position in the model of the tensor with this name
  uint32_t position(const std::string& name) const {
    return positions_.at(name);
  }

private:
  const model_map& map_;
  std::map<std::string, uint32_t> positions_;
  std::set<uint32_t> given_;
  std::vector<std::string> unknown_;
  mistakes missing_{"missing"};
  mistakes misshapen_{"of another shape"};
  mistakes not_plain_{"undefined, meta, sparse or quantised"};
};

} // namespace smp
