#pragma once

// The parts of a checkpoint that one rank holds.

#include "runtime/checkpoint/manifest.hpp"
#include "runtime/session/distributed_model.hpp"
#include "runtime/session/distributed_optimizer.hpp"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace smp {

class model_map;
struct tensor_slice;

/// A tensor that this rank writes, or a part of it.
struct held_tensor {
  tensor_role role = tensor_role::parameter;
  std::string name; // as in the manifest
  at::Tensor value;
  const tensor_slice* slice = nullptr; // null: the whole
  const tensor_slice* rows = nullptr;  // of the slice; null: all
  uint64_t replica = 0;
  /// Of an optimizer: the parameter, as position in the model's tensors, and
  /// the field.
  std::pair<uint32_t, std::string> state_of = {};
};

/// A rectangular part of a tensor.
struct tensor_box {
  std::vector<int64_t> begin; // in the whole, by axis
  std::vector<int64_t> sizes;
};

/// A rank may hold ranges of one axis, and only some rows of these.
/// @param sizes of what the rank holds
/// @param slice null: the whole
/// @param rows of the slice; null: all
/// @returns where it lies in the whole; several boxes follow each other along
/// the axis of the slice
std::vector<tensor_box> boxes_of(at::IntArrayRef sizes,
                                 const tensor_slice* slice,
                                 const tensor_slice* rows);

/// A parameter in an optimizer.
struct group_member {
  uint32_t optimizer = 0;
  uint32_t group = 0;
  std::string parameter;
};

template <class Inspector>
bool inspect(Inspector& f, group_member& x) {
  return f.object(x).fields(f.field("optimizer", x.optimizer),
                            f.field("group", x.group),
                            f.field("parameter", x.parameter));
}

/// Names a field of an optimizer's state of a parameter.
std::string state_name(size_t optimizer, const std::string& field,
                       const std::string& parameter);

/// A field of an optimizer's state: the float32 weights of a parameter in half
/// precision.
inline constexpr const char* master_field = "master";

/// Likewise: the average of a parameter's weights.
inline constexpr const char* average_field = "average";

/// @returns the fields of the state of a part of a parameter, sharing memory
named_tensors fields_of(const distributed_optimizer& x,
                        const distributed_optimizer::known_part& part);

/// Sets all of them. @param field returns the new value of one, in the shape
/// of the part, or an undefined tensor
void set_fields(distributed_optimizer& x,
                const distributed_optimizer::known_part& part,
                const std::function<at::Tensor(const std::string&)>& field);

/// Names the default generator of a rank.
std::string random_name(uint64_t rank);

/// @returns the state of the default generator of this process, uint8 [n]
at::Tensor random_state();
void set_random_state(const at::Tensor& x);

/// Runs `f` while all parameters hold weights, then restores those that held
/// averages. Collective over the world.
/// @param f throws on all ranks or on none
void with_weights(const std::vector<distributed_optimizer*>& optimizers,
                  const std::function<void()>& f);

/// What the current rank has to write: each tensor of the model is written by
/// one rank of one replica only, except buffers, of which each replica has its
/// own.
std::vector<held_tensor>
held_tensors(const distributed_model_base& model,
             const std::vector<distributed_optimizer*>& optimizers);

/// The same for the state of one optimizer only.
std::vector<held_tensor> held_states(const model_map& map,
                                     const distributed_optimizer& optimizer);

/// @returns the parameters of `model` in the groups of the optimizers, as far
/// as this rank holds them
std::vector<group_member>
group_members(const distributed_model_base& model,
              const std::vector<distributed_optimizer*>& optimizers);

} // namespace smp
