#pragma once

// Collectives over tensors between the ranks of a group.

#include "partition/rank_layout.hpp"
#include "transport/collectives/elements.hpp"
#include "transport/collectives/started_collective.hpp"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

namespace smp {

/// The future result of a collective.
class tensor_future {
public:
  tensor_future() = default;

  tensor_future(started_collective x, at::Tensor result, at::Tensor target)
    : started_(std::move(x)),
      result_(std::move(result)),
      target_(std::move(target)) {
    // nop
  }

  /// @returns whether `get` returns without waiting.
  bool done() const {
    return started_.done->done();
  }

  /// Waits. In a step, other executions of the rank run meanwhile.
  /// @throws error (rank_down) when a rank of the group is lost, (protocol)
  /// when the ranks' calls do not match, the failure of the step
  at::Tensor get() const;

private:
  started_collective started_;
  at::Tensor result_;
  /// Where to copy the result; undefined if it is already in place.
  at::Tensor target_;
};

// All ranks of the group must call, with tensors of the same sizes and type, in
// any order of names, and in a step of microbatches and phases. Calls of one
// group that agree in these match in call order. Tensors are in host memory on
// all ranks or on the device of each, and must not change until completion.
// Sums add in the order of the group, in float32 for float16 and bfloat16, with
// the same bits on all ranks and in every run. (Small sums over many ranks:
// transport/collectives/tree.hpp.)
//
// "Along axis 0" means: tensor [n, ...] of n ranks, by their positions in the
// group. All throw error (config) for invalid arguments, and (unsupported) for
// tensors on another device and types that cannot be summed. Autograd does not
// record them.

/// What distinguishes calls of one group and name.
enum class call_time : uint8_t {
  of_caller, // the caller's step, microbatch and phase
  of_session // only their order
};

/// `alone`: one root takes a sum, so the others help to compute it; `equal`:
/// all ranks are roots of such calls, of about the same total size.
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

/// @param x [n, ...], the contribution to each rank's sum along axis 0
tensor_future reduce_scatter(const at::Tensor& x,
                             const comm_group& group = comm_group::world,
                             reduce_op op = reduce_op::sum,
                             const std::string& name = {});

/// @returns [n, ...], the tensors of all ranks along axis 0.
tensor_future allgather(const at::Tensor& x,
                        const comm_group& group = comm_group::world,
                        const std::string& name = {});

/// The same on the rank at position `root` only; undefined on others.
tensor_future gather(const at::Tensor& x,
                     const comm_group& group = comm_group::world,
                     uint64_t root = 0, const std::string& name = {});

/// @param x [n, ...], what each rank gets along axis 0; on ranks other than
/// `root` only sizes and type count
tensor_future scatter(const at::Tensor& x,
                      const comm_group& group = comm_group::world,
                      uint64_t root = 0, const std::string& name = {});

/// @param x on ranks other than `root`, only sizes and type count
/// @returns the tensor of `root`
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

/// The result is an undefined tensor.
tensor_future barrier(const comm_group& group = comm_group::world,
                      const std::string& name = {});

} // namespace async

// The blocking versions; `barrier` is in groups.hpp.

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
