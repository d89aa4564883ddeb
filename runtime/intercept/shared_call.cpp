#include "runtime/intercept/shared_call.hpp"

#include "tp/distributed_module.hpp"
#include "transport/error.hpp"

namespace smp {

std::vector<at::Tensor> run_shared(call_scope& call,
                                   const distributed_module& how,
                                   const void* object,
                                   std::span<const at::Tensor> xs) {
  return run_shared(call, how, object, xs, row_place{});
}

std::vector<at::Tensor>
run_shared(call_scope& call, const distributed_module& how, const void* object,
           std::span<const at::Tensor> xs, const row_place& place) {
  if (xs.empty()) // they share it by the samples of the first one
    refuse_shared_call();
  if (!call.looks()) [[likely]]
    return how.forward_in_row(xs, place);
  call.arguments(object, xs);
  auto result = how.forward(xs);
  call.results(result);
  return result;
}

void refuse_shared_call() {
  throw error{error_code::user_code,
              "ranks share this module, but not a call of it with such "
              "arguments: they have to be tensors, tuples or vectors of them, "
              "or all that the hooks of smp::tp_register take"};
}

} // namespace smp
