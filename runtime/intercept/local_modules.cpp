#include "runtime/intercept/local_modules.hpp"

#include "runtime/base/rank_context.hpp"
#include "runtime/intercept/call_scope.hpp"
#include "runtime/intercept/script/script_calls.hpp"
#include "runtime/intercept/sequential.hpp"
#include "runtime/intercept/shared_call.hpp"
#include "runtime/model/model_map.hpp"
#include "runtime/remote/caller.hpp"

#include <torch/nn/module.h>

namespace smp {

invocation local_modules::run(module_id module, const call_target& x,
                              unpacker& in, const std::vector<value>& args,
                              packer& out) {
  auto& m = model_.map->model().modules.at(module.value);
  auto is_script = x.op != request_kind::call && x.op != request_kind::range;
  if (is_script != (m.script != nullptr))
    throw error{error_code::protocol, "a call does not fit its module"};
  if (auto* how = model_.map->shared(module);
      how && (x.op == request_kind::call || x.op == request_kind::method)) {
    call_scope noted{{.module = {}, .ordered = false, .served = true}};
    auto result = run_shared(noted, *how, m.identity(),
                             get_value<at::Tensor>(in, args.at(0)));
    value_path::scope place{out, "result"};
    return {put_value(out, result), {}};
  }
  if (is_script)
    return run_script(model_, module, x, in, args, out);
  if (m.object->is_training() != x.training)
    m.object->train(x.training);
  return x.op == request_kind::call
           ? find_invoker(x.invoker)(*m.object, in, args, out)
           : run_range(*m.object, x.first, x.last, in, args, out);
}

} // namespace smp
