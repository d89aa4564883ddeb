#include "runtime/verify/apart.hpp"

#include "runtime/base/here.hpp"
#include "runtime/intercept/call_observer.hpp"
#include "runtime/session/session.hpp"
#include "transport/error.hpp"

#include <ATen/Context.h>
#include <torch/csrc/autograd/function.h>

#include <unordered_set>
#include <vector>

namespace smp {

apart::apart(at::Device device)
  : session_(session::current_or_null()),
    observer_(call_observer::current()),
    generator_(at::globalContext().defaultGenerator(at::kCPU)),
    numbers_(generator_.get_state()) {
  session::set_current(nullptr);
  here::of_thread().device = device;
}

apart::~apart() {
  generator_.set_state(numbers_);
  call_observer::set_current(observer_);
  session::set_current(session_);
}

void check_plain(const at::Tensor& x) {
  std::vector<torch::autograd::Node*> open{x.grad_fn().get()};
  std::unordered_set<const void*> seen;
  while (!open.empty()) {
    auto* node = open.back();
    open.pop_back();
    if (!node || !seen.insert(node).second)
      continue;
    if (node->name().starts_with("smp::"))
      throw error{error_code::internal,
                  "the single-process run went through " + node->name()};
    for (auto& edge : node->next_edges())
      open.push_back(edge.function.get());
  }
}

at::Tensor unscaled(const at::Tensor& gradient, double scale) {
  auto result = gradient.to_dense();
  if (scale == 1)
    return result;
  auto wide = c10::promoteTypes(result.scalar_type(), at::kFloat);
  return result.to(wide).div(scale);
}

} // namespace smp
