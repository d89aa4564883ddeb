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
/// collectives that belong together have the same name.
class tensor_group {
public:
  virtual ~tensor_group();

  /// Number of ranks, T.
  virtual uint64_t size() const = 0;

  /// Position of this rank.
  virtual uint64_t rank() const = 0;

  /// Tells whether all peers have the same samples (`smp.prescaled_batch`), and
  /// so the same values of everything that is not shared.
  virtual bool same_samples() const {
    return false;
  }

  /// @returns a name for the next collective of the running call, the same on
  /// all peers
  virtual std::string next_name() = 0;

  /// @returns the tensors that modules exchanged in the running execution;
  /// null: each exchanges them itself
  virtual entered_tensors* entered() {
    return nullptr;
  }

  /// Runs `f`, which draws the random numbers that a call below the running one
  /// draws for the samples of `peer` (R23).
  /// @param calls paths of modules: the running call calls the first of them,
  /// each calls the next one, and the last one draws
  virtual void draw_as(uint64_t peer, const std::vector<std::string>& calls,
                       const std::function<void()>& f)
    = 0;

  // All peers call these, with tensors of the same sizes and type. They park,
  // and autograd does not record them. They throw error (protocol) if peers
  // differ, and the failure of the step if it fails.

  /// [...] -> [...], the sum of all peers.
  at::Tensor allreduce(const at::Tensor& x, const std::string& name) {
    return begin_allreduce(x, name)();
  }

  /// [...] -> [T, ...], the values of all peers.
  at::Tensor allgather(const at::Tensor& x, const std::string& name) {
    return begin_allgather(x, name)();
  }

  /// [T, ...] -> [...], the sum of all peers' values for this one.
  at::Tensor reduce_scatter(const at::Tensor& x, const std::string& name) {
    return begin_reduce_scatter(x, name)();
  }

  /// [T, ...] -> [T, ...], each peer's value for this one.
  at::Tensor all_to_all(const at::Tensor& x, const std::string& name) {
    return begin_all_to_all(x, name)();
  }

  /// The end of a collective that has begun: waits for its result. Call it
  /// once; the peer's input must not change before.
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

  /// [sum of `given`, ...] -> [sum of `taken`, ...], the rows to and from each
  /// peer, in order of peers.
  virtual at::Tensor
  exchange_rows(const at::Tensor& x, const std::vector<int64_t>& given,
                const std::vector<int64_t>& taken, const std::string& name)
    = 0;

  /// @returns the group of the calling thread's rank
  /// @throws error (unsupported) if there is none
  static tensor_group& current();

  /// @returns the group of a rank without peers, which computes alone what they
  /// would compute together
  static tensor_group& lone();

  /// Makes `x` the group of the calling thread; null: there is none.
  /// @returns the former group
  static tensor_group* set_current(tensor_group* x) noexcept;
};

} // namespace smp
