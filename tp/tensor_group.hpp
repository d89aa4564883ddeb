#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace smp {

class entered_tensors;

/// The ranks that share modules, as the code of these modules sees them on one
/// of them. Peers run other microbatches at the same time and in another order:
/// what belongs together has the same name.
class tensor_group {
public:
  virtual ~tensor_group();

  /// Number of ranks, T.
  virtual uint64_t size() const = 0;

  /// Position of this one.
  virtual uint64_t rank() const = 0;

  /// Tells whether all have the same samples (`smp.prescaled_batch`), and so
  /// the same of whatever nobody shares.
  virtual bool same_samples() const {
    return false;
  }

  /// @returns a name for the next collective of the call that runs, the same
  /// on all peers
  virtual std::string next_name() = 0;

  /// @returns what modules made of tensors in the execution that runs; null:
  /// each makes it for itself
  virtual entered_tensors* entered() {
    return nullptr;
  }

  /// Runs `f`, which draws the numbers that a call below the one that runs
  /// draws for the samples of a peer (R23).
  /// @param calls paths of modules: the call that runs calls the first of them,
  /// that the next one, and the last one draws
  virtual void draw_as(uint64_t peer, const std::vector<std::string>& calls,
                       const std::function<void()>& f)
    = 0;

  // All peers call these, with tensors of the same sizes and type. They park;
  // autograd stays behind. They throw error (protocol) where peers differ, and
  // what made the step fail.

  /// [...] -> [...], the sum of all peers.
  at::Tensor allreduce(const at::Tensor& x, const std::string& name) {
    return begin_allreduce(x, name)();
  }

  /// [...] -> [T, ...], what each peer has.
  at::Tensor allgather(const at::Tensor& x, const std::string& name) {
    return begin_allgather(x, name)();
  }

  /// [T, ...] -> [...], the sum of what all have for this one.
  at::Tensor reduce_scatter(const at::Tensor& x, const std::string& name) {
    return begin_reduce_scatter(x, name)();
  }

  /// [T, ...] -> [T, ...], what each peer has for this one.
  at::Tensor all_to_all(const at::Tensor& x, const std::string& name) {
    return begin_all_to_all(x, name)();
  }

  /// The end of a collective that has begun: waits for its result. To be called
  /// once; what the peer gave must not change before.
  using pending = std::function<at::Tensor()>;

  virtual pending begin_allreduce(const at::Tensor& x, const std::string& name)
    = 0;

  virtual pending begin_allgather(const at::Tensor& x, const std::string& name)
    = 0;

  virtual pending begin_reduce_scatter(const at::Tensor& x,
                                       const std::string& name)
    = 0;

  virtual pending begin_all_to_all(const at::Tensor& x, const std::string& name)
    = 0;

  /// [sum of `given`, ...] -> [sum of `taken`, ...], the rows for and of each
  /// peer, one after the other.
  virtual at::Tensor
  exchange_rows(const at::Tensor& x, const std::vector<int64_t>& given,
                const std::vector<int64_t>& taken, const std::string& name)
    = 0;

  /// @returns that of the calling thread's rank
  /// @throws error (unsupported) if there is none
  static tensor_group& current();

  /// @returns that of a rank without peers, which computes alone what they
  /// would together
  static tensor_group& lone();

  /// Makes `x` that of the calling thread; null: there is none.
  /// @returns the former one
  static tensor_group* set_current(tensor_group* x) noexcept;
};

} // namespace smp
