#pragma once

#include "runtime/model/call_translation.hpp"
#include "transport/ids.hpp"

#include <cstdint>
#include <optional>
#include <string>

namespace smp {

class distributed_module;

/// How tensor-parallel ranks share a module with all that is below it, where it
/// does not say otherwise.
struct tensor_parallel_config {
  /// "speed" or "memory", of transformer layers; empty: as for what is above,
  /// or as `smp.optimize` says.
  std::string optimize = {};
};

/// What code says of sharing a module.
struct sharing_mark {
  bool enabled = true;
  /// `tensor_parallel_config::optimize` is "memory", and not "speed".
  std::optional<bool> saves_memory = {};
};

/// @throws error (config) if `x` is none, or has no effect
sharing_mark make_sharing_mark(bool enabled, const tensor_parallel_config& x);

/// What an intercepted module knows about its place. Empty until the model is
/// partitioned: then calls run here.
struct hook_state {
  module_id id;
  /// Rank that owns the module.
  rank_id owner;
  /// False if the arguments of calls are packed: for `owner`, or on this rank
  /// for an interceptor that computes them again in backward.
  bool local = true;
  /// See `model_map::recomputed`; 0 on ranks that do not own the module.
  uint32_t region = 0;
  /// Calls on this rank wait for the turn of their microbatch (R19).
  bool ordered = false;
  /// See `model_map::stream_of`; 0 for a module of no partitioned model.
  uint64_t stream = 0;
  /// Manual placement: a pp_rank.
  std::optional<uint32_t> pinned;
  /// Whether tensor-parallel ranks are to share the module, if code says so.
  std::optional<sharing_mark> sharing;
  /// How they do; null: calls on this rank run the module's own code.
  const distributed_module* distributed = nullptr;
  /// Between its calls and those of `distributed`; null: tensors go in and out
  /// as they are.
  const call_translation* translation = nullptr;
  /// What `distributed` gives to a child of a Sequential; null: one tensor.
  child_result result = nullptr;
};

/// Modules that are made while it lives, as `smp::submodule`, go to this
/// pp_rank with all that is below them (manual placement). Scopes nest; the
/// innermost wins. For other modules see `smp::set_partition`.
class partition_scope {
public:
  explicit partition_scope(uint32_t pp_rank);
  ~partition_scope();
  partition_scope(const partition_scope&) = delete;
  partition_scope& operator=(const partition_scope&) = delete;

  /// @returns the pp_rank of the innermost scope of this thread, if any.
  static std::optional<uint32_t> current() noexcept;

private:
  std::optional<uint32_t> previous_;
};

/// Modules that are made while it lives, as `smp::submodule`, are shared by
/// tensor-parallel ranks where that is possible, or not. Scopes nest; the
/// innermost wins. For other modules see `smp::set_tensor_parallelism`.
class tensor_parallelism_scope {
public:
  /// @throws error (config) if `x` is none, or has no effect
  explicit tensor_parallelism_scope(bool enabled = true,
                                    const tensor_parallel_config& x = {});

  ~tensor_parallelism_scope();
  tensor_parallelism_scope(const tensor_parallelism_scope&) = delete;
  tensor_parallelism_scope& operator=(const tensor_parallelism_scope&) = delete;

  /// @returns what the innermost scope of this thread says, if any.
  static std::optional<sharing_mark> current() noexcept;

private:
  std::optional<sharing_mark> previous_;
};

/// Base of everything whose calls smp intercepts; found by `dynamic_cast`
/// during the walk.
class hook_base {
public:
  hook_base() {
    smp_hook.pinned = partition_scope::current();
    smp_hook.sharing = tensor_parallelism_scope::current();
  }

  /// A copy of a module is a module of its own.
  hook_base(const hook_base&) : hook_base() {
    // nop
  }

  hook_base& operator=(const hook_base&) {
    return *this;
  }

  virtual ~hook_base() = default;

  hook_state smp_hook;
};

/// Base of modules that tensor-parallel ranks share where they can, unless code
/// says of one itself that they shall not.
struct shared_by_itself {
  virtual ~shared_by_itself() = default;
};

} // namespace smp
