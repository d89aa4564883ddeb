#include "runtime/collectives/tensor_collectives.hpp"

#include "actors/board/call_slot.hpp"
#include "actors/board/rank_board.hpp"
#include "runtime/base/here.hpp"
#include "runtime/base/rank_context.hpp"
#include "runtime/collectives/current_rank.hpp"
#include "runtime/collectives/parking_waiter.hpp"
#include "runtime/device/rank_device.hpp"
#include "runtime/execution/running_call.hpp"
#include "runtime/lazy/promise.hpp"
#include "runtime/values/tensor_bridge.hpp"
#include "transport/collectives/collectives.hpp"

#include <ATen/ops/empty.h>

#include <optional>
#include <utility>

namespace smp {

namespace {

using kind = collective_kind;

/// Outside of a step there is no microbatch.
constexpr microbatch_id no_microbatch{~uint64_t{0}};

element_type type_of(const at::Tensor& x, const std::string& what) {
  switch (x.scalar_type()) {
    case at::kByte:
      return element_type::uint8;
    case at::kChar:
      return element_type::int8;
    case at::kShort:
      return element_type::int16;
    case at::kInt:
      return element_type::int32;
    case at::kLong:
      return element_type::int64;
    case at::kHalf:
      return element_type::float16;
    case at::kBFloat16:
      return element_type::bfloat16;
    case at::kFloat:
      return element_type::float32;
    case at::kDouble:
      return element_type::float64;
    case at::kBool:
      return element_type::boolean;
    case at::kComplexFloat:
      return element_type::complex64;
    case at::kComplexDouble:
      return element_type::complex128;
    default:
      throw error{error_code::unsupported, what + ": no tensors of type "
                                             + c10::toString(x.scalar_type())};
  }
}

/// One call of the user, in preparation for `collectives`.
class tensor_call {
public:
  tensor_call(kind what, const comm_group& group, const std::string& name,
              call_time time = call_time::of_caller)
    : rank_(current_rank()) {
    auto& label = call_.label;
    label.group = rank_.layout().members(group, rank_.self());
    label.name = name.empty() ? to_string(group) : name;
    label.microbatch = no_microbatch;
    if (auto ex = running_call::current(); ex && time == call_time::of_caller) {
      label.step = ex->step();
      label.microbatch = ex->microbatch();
      label.what = ex->in_backward() ? phase::backward : phase::forward;
      call_.advice
        = group == comm_group::tp
            ? "ranks that share a module have to call it with as many rows "
              "each: one that gets rows chosen from the data stays out of "
              "tensor_parallel.modules"
            : "the batches of ranks that compute together have to have "
              "the same sizes";
      auto* slot = here::of_thread().slot;
      call_.place = slot && slot->module() != call_slot::none
                      ? rank_.board().path_of(module_id{slot->module()})
                      : ex->module_path();
    }
    self_ = rank_.layout().rank(group, rank_.self());
    call_.what.kind = what;
  }

  tensor_call(kind what, const at::Tensor& x, const comm_group& group,
              const std::string& name, call_time time = call_time::of_caller)
    : tensor_call(what, group, name, time) {
    if (!x.defined())
      throw config_error(call_.describe() + ": the tensor is not defined");
    keep_promises(std::vector<at::Tensor>{x});
    x_ = x.detach();
    if (!x_.is_cpu() && x_.device() != rank_.device())
      throw error{error_code::unsupported,
                  call_.describe() + ": a tensor on device " + x_.device().str()
                    + ", while this rank computes on " + rank_.device().str()};
    call_.what.type = type_of(x, call_.describe());
    call_.what.shape = x_.sizes().vec();
  }

  tensor_call&& with(reduce_op op) && {
    call_.what.op = op;
    return std::move(*this);
  }

  tensor_call&& with_root(uint64_t root, root_load load = root_load::alone) && {
    call_.what.root = root;
    call_.what.every_root = load == root_load::equal;
    return std::move(*this);
  }

  /// Requires a tensor with a part for each rank.
  tensor_call&& of_parts() && {
    if (x_.dim() == 0 || x_.size(0) != static_cast<int64_t>(size()))
      refuse("a tensor [" + std::to_string(size())
             + ", ...] is expected, with a part for each rank");
    call_.what.shape.erase(call_.what.shape.begin());
    return std::move(*this);
  }

  tensor_call&& of_rows(std::vector<uint64_t> given,
                        std::vector<uint64_t> taken) && {
    auto rows = count_of(given);
    if (x_.dim() == 0 || x_.size(0) != rows)
      refuse("a tensor [" + std::to_string(rows)
             + ", ...] is expected, with as many rows as are given");
    call_.what.shape.erase(call_.what.shape.begin());
    rows_taken_ = count_of(taken);
    call_.what.rows = std::move(given);
    call_.rows_taken = std::move(taken);
    return std::move(*this);
  }

  bool is_root() const {
    return self_ == call_.what.root;
  }

  int64_t rows_taken() const {
    return rows_taken_;
  }

  /// Sizes of the result, with `rows` parts along axis 0.
  std::vector<int64_t> parts(int64_t rows) const {
    auto result = call_.what.shape;
    result.insert(result.begin(), rows);
    return result;
  }

  std::vector<int64_t> part() const {
    return call_.what.shape;
  }

  int64_t size() const {
    return static_cast<int64_t>(call_.label.group.size());
  }

  at::Tensor made(const std::vector<int64_t>& sizes) const {
    return at::empty(sizes, x_.options());
  }

  /// @param gives whether any of the tensor is sent
  /// @param result undefined if there is none
  /// @param target where to copy the result; undefined: nowhere
  tensor_future start(bool gives, at::Tensor result,
                      at::Tensor target = {}) && {
    struct memory {
      tensor_ref input;
      at::Tensor output;
    };
    auto held = std::make_shared<memory>();
    if (gives) {
      if (auto why = refusal_of(x_); !why.empty())
        throw error{error_code::unsupported, call_.describe() + ": " + why};
      held->input = to_tensor_ref(x_.contiguous(), false);
      call_.input = held->input.data;
    }
    if (result.defined()) {
      held->output = result;
      call_.output = result.mutable_data_ptr();
    }
    call_.owner = std::move(held);
    if (x_.defined() && !x_.is_cpu()) {
      call_.device = {static_cast<uint8_t>(x_.device().type()),
                      x_.device().index()};
      // What used the memory of the result before is over by then, too.
      call_.ready = rank_.launches()->point();
    }
    auto started = rank_.collectives().start(std::move(call_));
    return {std::move(started), std::move(result), std::move(target)};
  }

  /// Writes the result into the tensor itself.
  tensor_future start_in_place(const at::Tensor& x) && {
    auto gives = call_.what.kind != kind::broadcast || is_root();
    if (x_.is_contiguous() && refusal_of(x_).empty() && !x_.is_neg()
        && !x_.is_conj())
      return std::move(*this).start(gives, x_, x);
    auto result = made(part());
    return std::move(*this).start(gives, std::move(result), x);
  }

private:
  [[noreturn]] void refuse(const std::string& why) const {
    throw config_error(call_.describe() + ": " + why + ", not "
                       + c10::str(x_.sizes()));
  }

  /// A negative number would be a very large one here.
  int64_t count_of(const std::vector<uint64_t>& rows) const {
    int64_t result = 0;
    for (auto n : rows)
      if (__builtin_add_overflow(result, n, &result))
        throw config_error(call_.describe() + ": " + std::to_string(n)
                           + " rows are too many");
    return result;
  }

  const rank_context& rank_;
  at::Tensor x_;
  collective_call call_;
  uint64_t self_ = 0;
  int64_t rows_taken_ = 0;
};

} // namespace

at::Tensor tensor_future::get() const {
  std::optional<parking_waiter::parking> parking;
  if (!running_call::current())
    parking.emplace();
  waiter::current().wait(started_.done, started_.why);
  if (!target_.defined())
    return result_;
  if (!target_.is_same(result_) && !target_.is_alias_of(result_))
    target_.detach().copy_(result_);
  return target_;
}

// -- asynchronous -------------------------------------------------------------

tensor_future async::allreduce(const at::Tensor& x, const comm_group& group,
                               reduce_op op, const std::string& name) {
  auto call = tensor_call{kind::allreduce, x, group, name}.with(op);
  auto result = call.made(call.part());
  return std::move(call).start(true, std::move(result));
}

tensor_future async::allreduce_(const at::Tensor& x, const comm_group& group,
                                reduce_op op, const std::string& name,
                                call_time time) {
  return tensor_call{kind::allreduce, x, group, name, time}
    .with(op)
    .start_in_place(x);
}

tensor_future async::reduce(const at::Tensor& x, const comm_group& group,
                            uint64_t root, reduce_op op,
                            const std::string& name, call_time time,
                            root_load load) {
  auto call = tensor_call{kind::reduce, x, group, name, time}
                .with(op)
                .with_root(root, load);
  auto result = call.is_root() ? call.made(call.part()) : at::Tensor{};
  return std::move(call).start(true, std::move(result));
}

tensor_future async::reduce_scatter(const at::Tensor& x,
                                    const comm_group& group, reduce_op op,
                                    const std::string& name) {
  auto call = tensor_call{kind::reduce_scatter, x, group, name}
                .with(op)
                .of_parts();
  auto result = call.made(call.part());
  return std::move(call).start(true, std::move(result));
}

tensor_future async::allgather(const at::Tensor& x, const comm_group& group,
                               const std::string& name) {
  tensor_call call{kind::allgather, x, group, name};
  auto result = call.made(call.parts(call.size()));
  return std::move(call).start(true, std::move(result));
}

tensor_future async::gather(const at::Tensor& x, const comm_group& group,
                            uint64_t root, const std::string& name) {
  auto call = tensor_call{kind::gather, x, group, name}.with_root(root);
  auto result = call.is_root() ? call.made(call.parts(call.size()))
                               : at::Tensor{};
  return std::move(call).start(true, std::move(result));
}

tensor_future async::scatter(const at::Tensor& x, const comm_group& group,
                             uint64_t root, const std::string& name) {
  auto call = tensor_call{kind::scatter, x, group, name}
                .with_root(root)
                .of_parts();
  auto result = call.made(call.part());
  auto gives = call.is_root();
  return std::move(call).start(gives, std::move(result));
}

tensor_future async::broadcast(const at::Tensor& x, const comm_group& group,
                               uint64_t root, const std::string& name) {
  auto call = tensor_call{kind::broadcast, x, group, name}.with_root(root);
  auto result = call.made(call.part());
  auto gives = call.is_root();
  return std::move(call).start(gives, std::move(result));
}

tensor_future async::broadcast_(const at::Tensor& x, const comm_group& group,
                                uint64_t root, const std::string& name) {
  return tensor_call{kind::broadcast, x, group, name}
    .with_root(root)
    .start_in_place(x);
}

tensor_future async::all_to_all(const at::Tensor& x, const comm_group& group,
                                const std::string& name) {
  auto call = tensor_call{kind::all_to_all, x, group, name}.of_parts();
  auto result = call.made(call.parts(call.size()));
  return std::move(call).start(true, std::move(result));
}

tensor_future async::all_to_all(const at::Tensor& x,
                                std::vector<uint64_t> given,
                                std::vector<uint64_t> taken,
                                const comm_group& group,
                                const std::string& name) {
  auto call = tensor_call{kind::all_to_all, x, group, name}.of_rows(
    std::move(given), std::move(taken));
  auto result = call.made(call.parts(call.rows_taken()));
  return std::move(call).start(true, std::move(result));
}

tensor_future async::barrier(const comm_group& group, const std::string& name) {
  return tensor_call{kind::barrier, group, name}.start(false, {});
}

// -- waiting ------------------------------------------------------------------

at::Tensor allreduce(const at::Tensor& x, const comm_group& group, reduce_op op,
                     const std::string& name) {
  return async::allreduce(x, group, op, name).get();
}

at::Tensor allreduce_(const at::Tensor& x, const comm_group& group,
                      reduce_op op, const std::string& name) {
  return async::allreduce_(x, group, op, name).get();
}

at::Tensor reduce(const at::Tensor& x, const comm_group& group, uint64_t root,
                  reduce_op op, const std::string& name) {
  return async::reduce(x, group, root, op, name).get();
}

at::Tensor reduce_scatter(const at::Tensor& x, const comm_group& group,
                          reduce_op op, const std::string& name) {
  return async::reduce_scatter(x, group, op, name).get();
}

at::Tensor allgather(const at::Tensor& x, const comm_group& group,
                     const std::string& name) {
  return async::allgather(x, group, name).get();
}

at::Tensor gather(const at::Tensor& x, const comm_group& group, uint64_t root,
                  const std::string& name) {
  return async::gather(x, group, root, name).get();
}

at::Tensor scatter(const at::Tensor& x, const comm_group& group, uint64_t root,
                   const std::string& name) {
  return async::scatter(x, group, root, name).get();
}

at::Tensor broadcast(const at::Tensor& x, const comm_group& group,
                     uint64_t root, const std::string& name) {
  return async::broadcast(x, group, root, name).get();
}

at::Tensor all_to_all(const at::Tensor& x, const comm_group& group,
                      const std::string& name) {
  return async::all_to_all(x, group, name).get();
}

at::Tensor all_to_all(const at::Tensor& x, std::vector<uint64_t> given,
                      std::vector<uint64_t> taken, const comm_group& group,
                      const std::string& name) {
  return async::all_to_all(x, std::move(given), std::move(taken), group, name)
    .get();
}

} // namespace smp
