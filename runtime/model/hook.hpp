#pragma once

#include "runtime/model/call_translation.hpp"
#include "transport/ids.hpp"

#include <cstdint>
#include <optional>
#include <string>

namespace smp {

class distributed_module;

/// How tensor-parallel ranks share a module and everything below it, unless a
/// module below says otherwise.
struct tensor_parallel_config {
  /// "speed" or "memory", for transformer layers; empty: as the module above
  /// says, or `smp.optimize`.
  std::string optimize = {};
};

/// What user code says about sharing a module.
struct sharing_mark {
  bool enabled = true;
  /// `tensor_parallel_config::optimize` is "memory", and not "speed".
  std::optional<bool> saves_memory = {};
};

/// @throws error (config) if `x` is invalid, or has no effect
sharing_mark make_sharing_mark(bool enabled, const tensor_parallel_config& x);

/// What an intercepted module knows about its placement. Empty until the model
/// is partitioned; until then calls run here.
struct hook_state {
  module_id id;
  /// Rank that owns the module.
  rank_id owner;
  /// False if calls must pack their arguments: for `owner`, or on this rank for
  /// an interceptor that recomputes calls in backward.
  bool local = true;
  /// See `model_map::recomputed`; 0 on ranks that do not own the module.
  uint32_t region = 0;
  /// Calls on this rank wait for the turn of their microbatch (R19).
  bool ordered = false;
  /// See `model_map::stream_of`; 0 outside of partitioned models.
  uint64_t stream = 0;
  /// Manual placement: a pp_rank.
  std::optional<uint32_t> pinned;
  /// Whether tensor-parallel ranks are to share the module, if code says so.
  std::optional<sharing_mark> sharing;
  /// How they share it; null: calls on this rank run the module's own code.
  const distributed_module* distributed = nullptr;
  /// Translates between its calls and those of `distributed`; null:
  /// tensors pass unchanged.
  const call_translation* translation = nullptr;
  /// Builds the result of a Sequential's child; null: it is one tensor.
  child_result result = nullptr;
};

/// Modules created while this lives, as `smp::submodule`, go to this pp_rank
/// with everything below them (manual placement). Scopes nest; the innermost
/// wins. For other modules see `smp::set_partition`.
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

/// Tensor-parallel ranks share modules created while this lives, as
/// `smp::submodule`, where possible, or do not share them. Scopes nest; the
/// innermost wins. For other modules see `smp::set_tensor_parallelism`.
class tensor_parallelism_scope {
public:
  /// @throws error (config) if `x` is invalid, or has no effect
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

  /// A copy of a module is another module, with a hook of its own.
  hook_base(const hook_base&) : hook_base() {
    // nop
  }

  hook_base& operator=(const hook_base&) {
    return *this;
  }

  virtual ~hook_base() = default;

  hook_state smp_hook;
};

/// Base of modules that tensor-parallel ranks share by default where they can;
/// code can exclude each of them.
struct shared_by_itself {
  virtual ~shared_by_itself() = default;
};

} // namespace smp
