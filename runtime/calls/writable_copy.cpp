#include "runtime/calls/writable_copy.hpp"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <memory>
#include <string>
#include <utility>

namespace smp {

namespace {

namespace ag = torch::autograd;

/// Sets the gradient of the leaf behind it unchanged: AccumulateGrad would give
/// it the strides of the leaf (R63).
class identity_node : public ag::Node {
public:
  explicit identity_node(at::Tensor leaf) : leaf_(std::move(leaf)) {
    // nop
  }

  std::string name() const override {
    return "smp::argument";
  }

  ag::variable_list apply(ag::variable_list&& grads) override {
    auto& x = grads[0];
    if (!x.defined() || !x.has_storage() || leaf_.grad().defined())
      return std::move(grads);
    // Another holder of its bytes may add to them.
    leaf_.mutable_grad() = x.storage().use_count() > 1 ? x.clone() : x;
    return ag::variable_list(1);
  }

private:
  at::Tensor leaf_;
};

} // namespace

at::Tensor writable_copy(const at::Tensor& leaf) {
  auto result = leaf.variable_data();
  auto node = std::shared_ptr<ag::Node>(new identity_node{leaf},
                                        ag::deleteNode);
  node->set_next_edges({ag::impl::gradient_edge(leaf)});
  auto nr = node->add_input_metadata(result);
  ag::impl::set_gradient_edge(result, {node, nr});
  return result;
}

} // namespace smp
