#pragma once

// One walk over a model by object identity (R17): the same on every rank, so
// that positions in it can serve as ids.

#include "transport/ids.hpp"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace c10::ivalue {
struct Object;
} // namespace c10::ivalue

namespace torch::nn {
class Module;
} // namespace torch::nn

namespace smp {

struct hook_state;
class module_facts;

/// A module of the model; one object under several names is one entry.
struct walked_module {
  /// First path in the walk, "" for the root; then the other names.
  std::vector<std::string> names;
  /// Type name, demangled: "torch::nn::LinearImpl".
  std::string type;
  /// The module itself: a torch::nn module or one of TorchScript; the
  /// other pointer is null.
  torch::nn::Module* object = nullptr;
  c10::ivalue::Object* script = nullptr;
  /// What to ask of it, whichever it is. Keeps it alive, as code may replace it
  /// in its parent, except a root that no shared pointer holds.
  std::shared_ptr<module_facts> facts;
  /// Positions in `walked_model::modules`, in order of registration; a module
  /// with several parents is in the list of each.
  std::vector<uint32_t> children;
  uint32_t parent = 0;
  /// Positions in `walked_model::tensors`, direct ownership only.
  std::vector<uint32_t> tensors;
  /// Its calls can be intercepted: not those of the root, of containers and of
  /// the modules that R20 names.
  bool intercepted = false;
  /// The hooks of a torch::nn module, once `install_hooks`
  /// (runtime/intercept/hooks.hpp) has run.
  std::vector<hook_state*> hooks;
  /// Its `forward` only passes a value from child to child, so that consecutive
  /// children can be one request (R8).
  bool sequential = false;
  /// A container without code of its own (ModuleList, ModuleDict, Sequential):
  /// the walk finds its children; it never runs itself.
  bool container = false;
  /// Why microbatches must pass it in order, apart from its own buffers (R19),
  /// e.g. "sets its attribute 'calls'"; empty if there is no reason.
  std::string stateful;
  /// Buffers of other modules that its code reads, as positions in
  /// `walked_model::tensors`: it is ordered as long as one of them changes.
  std::vector<uint32_t> reads;

  /// The address by which objects are compared.
  const void* identity() const;
};

/// A parameter or buffer; one tensor under several names is one entry.
struct walked_tensor {
  std::vector<std::string> names;
  at::Tensor tensor;
  bool is_buffer = false; // anything but a parameter
  /// A plain attribute of a TorchScript module, e.g. in a list: it lives with
  /// its module like a buffer, but is not part of the state dict.
  bool is_attribute = false;
  /// Modules that own it directly, in walk order.
  std::vector<uint32_t> modules;
  /// A module whose code reads it though another one owns it; if any.
  std::optional<std::string> read_by = {};
};

struct walked_model {
  std::vector<walked_module> modules; // 0 is the root
  std::vector<walked_tensor> tensors;
  std::unordered_map<const void*, uint32_t> module_index; // by object
  std::unordered_map<const void*, uint32_t> tensor_index; // by TensorImpl

  /// @returns the position of a parameter or buffer, or -1.
  int64_t find(const at::Tensor& x) const;

  /// @returns the position of the module that has `name` among its names
  std::optional<uint32_t> find_module(std::string_view name) const;

  /// @returns a hint for a name or pattern that no module has: what exists
  /// below its last part that is right: "'blocks' has 0, 1, 2"
  std::string existing_near(std::string name) const;

  /// @returns the positions of that module and of all below it, by their names;
  /// none if there is no such module
  std::vector<uint32_t> modules_below(std::string_view name) const;

  /// @returns a module and all below it, each once
  std::vector<uint32_t> subtree(uint32_t module) const;

  /// Over names, types, shapes and dtypes; equal on ranks with the same model.
  uint64_t hash() const;
};

walked_model walk(torch::nn::Module& root);

} // namespace smp
