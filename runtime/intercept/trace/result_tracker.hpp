#pragma once

#include "partition/trace.hpp"

#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

namespace smp {

/// The argument tensors of a call; holds no references to them.
class passed_tensors {
public:
  passed_tensors() = default;

  explicit passed_tensors(std::span<const at::Tensor> xs);

  /// Tells whether any was changed in place since then.
  bool written() const;

  /// Tells whether any is among `xs`.
  bool any_in(std::span<const at::Tensor> xs) const;

private:
  struct entry {
    c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> tensor;
    int64_t version = 0;
  };

  std::vector<entry> entries_;
};

/// A call that does not wait helps only if its caller passes the results on to
/// other modules; a caller that computes with them must wait for them. During a
/// trace this finds out which it is, from the operations that each module's own
/// code runs. For one thread.
class result_tracker {
public:
  /// @param found receives how callers use results, by module
  /// @param where the module whose code runs; nullopt while not counting
  result_tracker(std::vector<module_trace>& found,
                 std::function<std::optional<module_id>()> where);

  ~result_tracker();

  result_tracker(const result_tracker&) = delete;
  result_tracker& operator=(const result_tracker&) = delete;

  /// A call of `module` by `caller` returned `xs`.
  void returned(module_id module, module_id caller,
                std::span<const at::Tensor> xs);

private:
  using weak_tensor = c10::weak_intrusive_ptr<c10::TensorImpl,
                                              c10::UndefinedTensorImpl>;

  /// A tensor that calls returned.
  struct entry {
    /// Keeps the address from being reused.
    weak_tensor tensor;
    /// The modules that returned it, innermost first.
    std::vector<module_id> modules;
    module_id caller;
    uint64_t call = 0;
  };

  struct sum;

  static std::unique_ptr<at::ObserverContext>
  on_begin(const at::RecordFunction& f);

  static void on_end(const at::RecordFunction& f, at::ObserverContext* x);

  entry* find(const at::IValue& x, module_id caller);

  /// The most recent call whose result an operation takes, and another one;
  /// null if there is none.
  std::pair<entry*, entry*> operands(const at::RecordFunction& f,
                                     module_id caller);

  std::vector<module_trace>& found_;
  std::function<std::optional<module_id>()> where_;
  std::unordered_map<const void*, entry> known_;
  /// By calling module: the last call it made.
  std::unordered_map<uint64_t, uint64_t> last_call_;
  uint64_t calls_ = 0;
  at::CallbackHandle handle_ = 0;
};

} // namespace smp
