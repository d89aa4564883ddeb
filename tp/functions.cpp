#include "tp/functions.hpp"

#include "tp/refusals.hpp"
#include "tp/slices.hpp"
#include "tp/tensor_group.hpp"
#include "transport/error.hpp"

#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <numeric>
#include <string>

namespace smp::nn {

namespace {

namespace ag = torch::autograd;

int64_t axis_of(const at::Tensor& x, int64_t dim) {
  auto result = dim < 0 ? dim + x.dim() : dim;
  if (result < 0 || result >= x.dim())
    throw error{error_code::user_code,
                "a collective along axis " + std::to_string(dim)
                  + " of a tensor of " + std::to_string(x.dim()) + " axes"};
  return result;
}

at::Tensor gathered(const at::Tensor& x, int64_t dim, const std::string& name) {
  return merged(tensor_group::current().allgather(x.contiguous(), name), dim);
}

at::Tensor scattered(const at::Tensor& x, int64_t dim,
                     const std::string& name) {
  auto& group = tensor_group::current();
  return group.reduce_scatter(slices_of(x, dim, group.size()), name);
}

at::Tensor exchanged(const at::Tensor& x, int64_t split, int64_t merge,
                     const std::string& name) {
  auto& group = tensor_group::current();
  return merged(group.all_to_all(slices_of(x, split, group.size()), name),
                merge);
}

at::Tensor summed(const at::Tensor& x, const std::string& name) {
  return tensor_group::current().allreduce(x.contiguous(), name);
}

at::Tensor own_slice(const at::Tensor& x, int64_t dim) {
  auto& group = tensor_group::current();
  return slices_of(x, dim, group.size())
    .select(0, static_cast<int64_t>(group.rank()))
    .clone(); // a result must not be a view of the input
}

/// What backward needs: the axes and the name. (Backward runs in any order,
/// too.)
void keep(ag::AutogradContext* to, int64_t first, int64_t second,
          const std::string& name) {
  to->saved_data["first"] = first;
  to->saved_data["second"] = second;
  to->saved_data["name"] = name;
}

int64_t first_of(ag::AutogradContext* x) {
  return x->saved_data["first"].toInt();
}

int64_t second_of(ag::AutogradContext* x) {
  return x->saved_data["second"].toInt();
}

/// In backward.
/// @throws error (unsupported) if that records a graph
std::string name_of(ag::AutogradContext* x) {
  auto result = x->saved_data["name"].toStringRef();
  refuse_second_derivatives(result);
  return result;
}

struct gather_function : ag::Function<gather_function> {
  static at::Tensor forward(ag::AutogradContext* c, const at::Tensor& x,
                            int64_t dim, const std::string& name) {
    keep(c, dim, 0, name);
    return gathered(x, dim, name);
  }

  static ag::variable_list backward(ag::AutogradContext* c,
                                    const ag::variable_list& grads) {
    return {scattered(grads[0], first_of(c), name_of(c)), {}, {}};
  }
};

struct scatter_function : ag::Function<scatter_function> {
  static at::Tensor forward(ag::AutogradContext* c, const at::Tensor& x,
                            int64_t dim, const std::string& name) {
    keep(c, dim, 0, name);
    return scattered(x, dim, name);
  }

  static ag::variable_list backward(ag::AutogradContext* c,
                                    const ag::variable_list& grads) {
    return {gathered(grads[0], first_of(c), name_of(c)), {}, {}};
  }
};

struct exchange_function : ag::Function<exchange_function> {
  static at::Tensor forward(ag::AutogradContext* c, const at::Tensor& x,
                            int64_t split, int64_t merge,
                            const std::string& name) {
    keep(c, split, merge, name);
    return exchanged(x, split, merge, name);
  }

  static ag::variable_list backward(ag::AutogradContext* c,
                                    const ag::variable_list& grads) {
    return {
      exchanged(grads[0], second_of(c), first_of(c), name_of(c)), {}, {}, {}};
  }
};

struct sum_function : ag::Function<sum_function> {
  static at::Tensor forward(ag::AutogradContext*, const at::Tensor& x,
                            const std::string& name) {
    return summed(x, name);
  }

  static ag::variable_list backward(ag::AutogradContext*,
                                    const ag::variable_list& grads) {
    return {grads[0], {}};
  }
};

struct sum_backward_function : ag::Function<sum_backward_function> {
  static at::Tensor forward(ag::AutogradContext* c, const at::Tensor& x,
                            const std::string& name) {
    keep(c, 0, 0, name);
    return x.view_as(x);
  }

  static ag::variable_list backward(ag::AutogradContext* c,
                                    const ag::variable_list& grads) {
    return {summed(grads[0], name_of(c)), {}};
  }
};

struct narrow_function : ag::Function<narrow_function> {
  static at::Tensor forward(ag::AutogradContext* c, const at::Tensor& x,
                            int64_t dim, const std::string& name) {
    keep(c, dim, 0, name);
    return own_slice(x, dim);
  }

  static ag::variable_list backward(ag::AutogradContext* c,
                                    const ag::variable_list& grads) {
    return {gathered(grads[0], first_of(c), name_of(c)), {}, {}};
  }
};

struct merge_function : ag::Function<merge_function> {
  static at::Tensor forward(ag::AutogradContext* c, const at::Tensor& x,
                            int64_t dim, const std::string& name) {
    keep(c, dim, 0, name);
    return gathered(x, dim, name);
  }

  static ag::variable_list backward(ag::AutogradContext* c,
                                    const ag::variable_list& grads) {
    refuse_second_derivatives(c->saved_data["name"].toStringRef());
    return {own_slice(grads[0], first_of(c)), {}, {}};
  }
};

struct rows_function : ag::Function<rows_function> {
  static at::Tensor forward(ag::AutogradContext* c, const at::Tensor& x,
                            const std::vector<int64_t>& given,
                            const std::vector<int64_t>& taken,
                            const std::string& name) {
    keep(c, 0, 0, name);
    c->saved_data["given"] = given;
    c->saved_data["taken"] = taken;
    return tensor_group::current().exchange_rows(x.contiguous(), given, taken,
                                                 name);
  }

  static ag::variable_list backward(ag::AutogradContext* c,
                                    const ag::variable_list& grads) {
    auto x = tensor_group::current().exchange_rows(
      grads[0].contiguous(), c->saved_data["taken"].toIntVector(),
      c->saved_data["given"].toIntVector(), name_of(c));
    return {x, {}, {}, {}};
  }
};

void check_counts(const std::vector<int64_t>& xs) {
  auto peers = tensor_group::current().size();
  if (xs.size() != peers
      || std::any_of(xs.begin(), xs.end(), [](auto x) { return x < 0; }))
    throw error{error_code::user_code,
                "an exchange of rows needs a number, 0 or more, for each of "
                  + std::to_string(peers) + " tensor-parallel ranks"};
}

std::string next_name() {
  return tensor_group::current().next_name();
}

} // namespace

at::Tensor fused_allgather_for_tp(const at::Tensor& x, int64_t dim) {
  return gather_function::apply(x, axis_of(x, dim), next_name());
}

at::Tensor reduce_scatter_for_tp(const at::Tensor& x, int64_t dim) {
  return scatter_function::apply(x, axis_of(x, dim), next_name());
}

at::Tensor scatter_and_merge_for_tp(const at::Tensor& x, int64_t split_dim,
                                    int64_t merge_dim) {
  return exchange_function::apply(x, axis_of(x, split_dim),
                                  axis_of(x, merge_dim), next_name());
}

at::Tensor exchange_rows_for_tp(const at::Tensor& x,
                                const std::vector<int64_t>& given,
                                const std::vector<int64_t>& taken) {
  check_counts(given);
  check_counts(taken);
  auto rows = std::accumulate(given.begin(), given.end(), int64_t{0});
  if (x.dim() == 0 || x.size(0) != rows)
    throw error{error_code::user_code,
                "an exchange of " + std::to_string(rows)
                  + " rows of a tensor of "
                  + std::to_string(x.dim() == 0 ? 0 : x.size(0))};
  return rows_function::apply(x, given, taken, next_name());
}

at::Tensor fwd_allreduce_for_tp(const at::Tensor& x) {
  return sum_function::apply(x, next_name());
}

at::Tensor bwd_allreduce_for_tp(const at::Tensor& x) {
  auto name = next_name();
  // In no_grad mode, its result would require grad like `x`.
  return at::GradMode::is_enabled() ? sum_backward_function::apply(x, name) : x;
}

at::Tensor narrow_for_tp(const at::Tensor& x, int64_t dim) {
  return narrow_function::apply(x, axis_of(x, dim), next_name());
}

at::Tensor merge_for_tp(const at::Tensor& x, int64_t dim) {
  return merge_function::apply(x, axis_of(x, dim), next_name());
}

// -- in both kinds of batches -------------------------------------------------

namespace {

bool same_samples() {
  return tensor_group::current().same_samples();
}

} // namespace

at::Tensor gather_batch_for_tp(const at::Tensor& x) {
  return same_samples() ? bwd_allreduce_for_tp(x)
                        : fused_allgather_for_tp(x, 0);
}

at::Tensor scatter_batch_for_tp(const at::Tensor& x) {
  return same_samples() ? fwd_allreduce_for_tp(x) : reduce_scatter_for_tp(x, 0);
}

at::Tensor split_batch_for_tp(const at::Tensor& x, int64_t dim) {
  return same_samples() ? narrow_for_tp(x, dim)
                        : scatter_and_merge_for_tp(x, dim, 0);
}

at::Tensor merge_batch_for_tp(const at::Tensor& x, int64_t dim) {
  return same_samples() ? merge_for_tp(x, dim)
                        : scatter_and_merge_for_tp(x, 0, dim);
}

at::Tensor gather_slices_for_tp(const at::Tensor& x, int64_t dim) {
  return same_samples() ? merge_for_tp(x, dim) : fused_allgather_for_tp(x, dim);
}

} // namespace smp::nn
