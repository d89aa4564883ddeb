#include "runtime/intercept/local_modules.hpp"

#include "runtime/base/rank_context.hpp"
#include "runtime/calls/caller.hpp"
#include "runtime/execution/running_call.hpp"
#include "runtime/intercept/call_scope.hpp"
#include "runtime/intercept/script/script_calls.hpp"
#include "runtime/intercept/sequential.hpp"
#include "runtime/model/model_map.hpp"

#include <torch/nn/module.h>

#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <utility>

namespace smp {

namespace {

bool is_range(const call_target& x) {
  return x.kind == request_kind::range || x.kind == request_kind::method_range;
}

bool is_call(const call_target& x) {
  return x.kind == request_kind::call || x.kind == request_kind::method;
}

/// Tells whether backward may come.
bool in_graph() {
  return running_call::current() != nullptr && at::GradMode::is_enabled()
         && !c10::InferenceMode::is_enabled();
}

} // namespace

/// For a range, the region of its first child.
uint32_t local_modules::region_of(module_id module,
                                  const call_target& x) const {
  auto& map = *model_.map;
  if (is_call(x))
    return map.recomputed(module).region;
  auto& children = map.model().modules.at(module.value).children;
  return is_range(x) && x.first < children.size()
           ? map.recomputed(module_id{children[x.first]}).region
           : 0;
}

/// @returns the first child after `x.first` that is in another region.
size_t local_modules::end_of_region(module_id module,
                                    const call_target& x) const {
  auto next = x;
  for (++next.first; next.first < x.last; ++next.first)
    if (region_of(module, next) != region_of(module, x))
      break;
  return next.first;
}

const model_map& local_modules::map() const noexcept {
  return *model_.map;
}

invocation local_modules::run_inside(packed_call x, unpacker& in, packer& out) {
  while (x.region != 0 && x.next < num_interceptors)
    if (auto* y = interceptor_at(x.next++))
      if (auto done = y->around(x, in, out))
        return std::move(*done);
  return run_code(x.module, x.target, in, x.args, out);
}

invocation local_modules::run(module_id module, const call_target& x,
                              unpacker& in, const std::vector<value>& args,
                              packer& out) {
  auto n = map().model().modules.at(module.value).children.size();
  // An invalid range is rejected where it runs.
  if (!in_graph() || (is_range(x) && (x.first >= x.last || x.last > n)))
    return run_inside({*this, module, x, args}, in, out);
  auto run_part = [&](const call_target& part, unpacker& from,
                      const std::vector<value>& xs, packer& to) {
    return run_inside({*this, module, part, xs, region_of(module, part)}, from,
                      to);
  };
  auto part = x;
  if (!is_range(x) || (part.last = end_of_region(module, x)) == x.last)
    return run_part(part, in, args, out);
  packer found;
  auto result = run_part(part, in, args, found);
  while (part.last < x.last) {
    part.first = part.last;
    part.last = x.last;
    part.last = end_of_region(module, part);
    // The value moves on: drop the references to it here (R57).
    unpacker moving{found.tensors()};
    found = packer{};
    result = run_part(part, moving, {std::move(result.result)},
                      part.last < x.last ? found : out);
  }
  return result;
}

call_result local_modules::call(module_id module, const call_target& x,
                                const packer& in,
                                const std::vector<value>& args) {
  intercepted_call what{.module = module};
  if (is_call(x)) {
    what.ordered = model_.map->keeps_order(module);
    what.stream = model_.map->stream_of(module);
  }
  call_scope noted{what};
  auto own = x;
  own.own = true;
  unpacker tensors{in.tensors()};
  packer out;
  auto done = run(module, own, tensors, args, out);
  return {std::move(done.result), std::move(done.changed),
          unpacker{out.tensors()}};
}

/// Runs the code of a call directly, without `packed_call` interception.
invocation local_modules::run_code(module_id module, const call_target& x,
                                   unpacker& in, const std::vector<value>& args,
                                   packer& out) {
  auto& m = model_.map->model().modules.at(module.value);
  auto is_script = x.kind != request_kind::call
                   && x.kind != request_kind::range;
  if (is_script != (m.script != nullptr))
    throw error{error_code::protocol, "a call does not fit its module"};
  if (!is_script && m.object->is_training() != x.training)
    m.object->train(x.training);
  if (is_script)
    return run_script(model_, module, x, in, args, out);
  return x.kind == request_kind::call
           ? find_invoker(x.invoker)(*m.object, in, args, out)
           : run_range(*m.object, x.first, x.last, !x.own, in, args, out);
}

} // namespace smp
