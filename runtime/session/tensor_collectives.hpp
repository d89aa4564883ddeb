#pragma once

// Sums and moves of tensors between the ranks of a group.

#include "partition/rank_layout.hpp"
#include "transport/collectives/elements.hpp"
#include "transport/collectives/started_collective.hpp"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

namespace smp {

/// What a collective makes.
class tensor_future {
public:
  tensor_future() = default;

  tensor_future(started_collective x, at::Tensor result, at::Tensor target = {})
    : started_(std::move(x)),
      result_(std::move(result)),
      target_(std::move(target)) {
    // nop
  }

  /// @returns whether `get` would not wait.
  bool done() const {
    return started_.done->done();
  }

  /// Waits. In a step, other executions of the rank go on meanwhile.
  /// @throws error (rank_down) when a rank of the group is lost, (protocol)
  /// when ranks want different things, the failure of the step
  at::Tensor get() const;

private:
  started_collective started_;
  at::Tensor result_;
  /// Where to the result has to be copied; undefined if it is there.
  at::Tensor target_;
};

// All ranks of the group call, with tensors of the same sizes and type, in any
// order of names, and in a step of microbatches and phases. Calls of one group
// that agree in these meet in their order. Tensors are in host memory, and must
// not change until the end. Sums are those of adding in the order of the group,
// in float32 for float16 and bfloat16, with the same bits on all ranks and in
// every run. (Small ones among many ranks: transport/collectives/tree.hpp.)
//
// "Along axis 0" means: tensor [n, ...] of n ranks, by their positions in the
// group. All throw error (config) for what does not fit, and (unsupported) for
// tensors that are not in host memory and types that cannot be summed. Autograd
// stays behind.

/// What tells calls of one group and name apart.
enum class call_time : uint8_t {
  of_caller, // the step, microbatch and phase that the caller is in
  of_session // their order alone
};

/// Whether a root takes a sum alone, so that the others help to make it, or all
/// of them are roots of such calls, of about as many bytes in all.
enum class root_load : uint8_t { alone, equal };

namespace async {

/// Sum, mean or maximum over the group.
tensor_future allreduce(const at::Tensor& x,
                        const comm_group& group = comm_group::world,
                        reduce_op op = reduce_op::sum,
                        const std::string& name = {});

/// The same, into `x` itself.
tensor_future allreduce_(const at::Tensor& x,
                         const comm_group& group = comm_group::world,
                         reduce_op op = reduce_op::sum,
                         const std::string& name = {},
                         call_time time = call_time::of_caller);

/// The same on the rank at position `root` only; undefined on others.
tensor_future reduce(const at::Tensor& x,
                     const comm_group& group = comm_group::world,
                     uint64_t root = 0, reduce_op op = reduce_op::sum,
                     const std::string& name = {},
                     call_time time = call_time::of_caller,
                     root_load load = root_load::alone);

/// @param x [n, ...], what goes into the sum of each rank along axis 0
tensor_future reduce_scatter(const at::Tensor& x,
                             const comm_group& group = comm_group::world,
                             reduce_op op = reduce_op::sum,
                             const std::string& name = {});

/// @returns [n, ...], what each rank has along axis 0.
tensor_future allgather(const at::Tensor& x,
                        const comm_group& group = comm_group::world,
                        const std::string& name = {});

/// The same on the rank at position `root` only; undefined on others.
tensor_future gather(const at::Tensor& x,
                     const comm_group& group = comm_group::world,
                     uint64_t root = 0, const std::string& name = {});

/// @param x [n, ...], what each rank gets along axis 0; of other ranks than
/// `root` only sizes and type count
tensor_future scatter(const at::Tensor& x,
                      const comm_group& group = comm_group::world,
                      uint64_t root = 0, const std::string& name = {});

/// @param x of other ranks than `root`, only sizes and type count
/// @returns what `root` has
tensor_future broadcast(const at::Tensor& x,
                        const comm_group& group = comm_group::world,
                        uint64_t root = 0, const std::string& name = {});

/// The same, into `x` itself.
tensor_future broadcast_(const at::Tensor& x,
                         const comm_group& group = comm_group::world,
                         uint64_t root = 0, const std::string& name = {});

/// @param x [n, ...], what each rank gets along axis 0
/// @returns [n, ...], what each rank gave
tensor_future all_to_all(const at::Tensor& x,
                         const comm_group& group = comm_group::world,
                         const std::string& name = {});

/// The same with different numbers of rows.
/// @param x [sum of `given`, ...], the rows for each rank, one after the other
/// @param given,taken rows to and from each rank, by position
/// @returns [sum of `taken`, ...]
tensor_future all_to_all(const at::Tensor& x, std::vector<uint64_t> given,
                         std::vector<uint64_t> taken,
                         const comm_group& group = comm_group::world,
                         const std::string& name = {});

/// What it makes is undefined.
tensor_future barrier(const comm_group& group = comm_group::world,
                      const std::string& name = {});

} // namespace async

// The same, waiting; `barrier` is in groups.hpp.

at::Tensor allreduce(const at::Tensor& x,
                     const comm_group& group = comm_group::world,
                     reduce_op op = reduce_op::sum,
                     const std::string& name = {});

at::Tensor allreduce_(const at::Tensor& x,
                      const comm_group& group = comm_group::world,
                      reduce_op op = reduce_op::sum,
                      const std::string& name = {});

at::Tensor reduce(const at::Tensor& x,
                  const comm_group& group = comm_group::world,
                  uint64_t root = 0, reduce_op op = reduce_op::sum,
                  const std::string& name = {});

at::Tensor reduce_scatter(const at::Tensor& x,
                          const comm_group& group = comm_group::world,
                          reduce_op op = reduce_op::sum,
                          const std::string& name = {});

at::Tensor allgather(const at::Tensor& x,
                     const comm_group& group = comm_group::world,
                     const std::string& name = {});

at::Tensor gather(const at::Tensor& x,
                  const comm_group& group = comm_group::world,
                  uint64_t root = 0, const std::string& name = {});

at::Tensor scatter(const at::Tensor& x,
                   const comm_group& group = comm_group::world,
                   uint64_t root = 0, const std::string& name = {});

at::Tensor broadcast(const at::Tensor& x,
                     const comm_group& group = comm_group::world,
                     uint64_t root = 0, const std::string& name = {});

at::Tensor all_to_all(const at::Tensor& x,
                      const comm_group& group = comm_group::world,
                      const std::string& name = {});

at::Tensor all_to_all(const at::Tensor& x, std::vector<uint64_t> given,
                      std::vector<uint64_t> taken,
                      const comm_group& group = comm_group::world,
                      const std::string& name = {});

} // namespace smp
