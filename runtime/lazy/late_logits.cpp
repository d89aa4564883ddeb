#include "runtime/lazy/late_logits.hpp"

#include "runtime/base/call_context.hpp"
#include "runtime/base/rank_context.hpp"
#include "runtime/deferred/boxed_arguments.hpp"
#include "runtime/lazy/promise.hpp"
#include "transport/error.hpp"

#include <ATen/core/Reduction.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/arange.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/UndefinedTensorImpl.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <optional>
#include <set>
#include <string_view>
#include <utility>
#include <vector>

namespace smp {

namespace {

namespace ag = torch::autograd;

/// Which rows of the logits a tensor has. Its axis `words` has all words.
struct selection {
  at::Tensor rows; // int64, the sizes of the tensor, but 1 at `words`
  int64_t words = 0;
};

using arguments = at::ArrayRef<c10::IValue>;
using weak_tensor = c10::weak_intrusive_ptr<c10::TensorImpl,
                                            c10::UndefinedTensorImpl>;

/// Leads gradients of late logits to what they were made of.
struct late_node final : ag::Node {
  ag::variable_list apply(ag::variable_list&& grads) override {
    if (!found)
      throw error{error_code::unsupported,
                  "a function of autograd has a gradient for logits that it "
                  "did not read in its forward: read them there, or do not "
                  "share the last layer (tensor_parallel.modules)"};
    return std::move(grads);
  }

  std::string name() const override {
    return "SmpLateLogits";
  }

  bool found = false;
};

// -- operations on rows -------------------------------------------------------

bool keeps_order(std::string_view name) {
  static const std::set<std::string_view> known{
    "aten::view",      "aten::reshape", "aten::_unsafe_view",
    "aten::flatten",   "aten::squeeze", "aten::unsqueeze",
    "aten::unflatten", "aten::view_as", "aten::reshape_as"};
  return known.contains(name);
}

bool copies(std::string_view name, std::string_view overload) {
  return name == "aten::contiguous" || name == "aten::clone"
         || name == "aten::alias"
         || (name == "aten::to" && overload == "dtype");
}

bool is_selection(const c10::OperatorName& x) {
  static const std::set<std::string_view> known{
    "aten::slice", "aten::narrow", "aten::transpose", "aten::permute"};
  return keeps_order(x.name) || copies(x.name, x.overload_name)
         || known.contains(x.name);
}

std::optional<int64_t> integer(const c10::IValue& x) {
  return x.isInt() ? std::optional{x.toInt()} : std::nullopt;
}

/// @param from a meta tensor: of what the rows are
/// @param to a meta tensor: the result of the operation
/// @returns the rows of the result, or nothing if they are not whole rows
std::optional<selection> select(const selection& x, const c10::OperatorName& op,
                                arguments args, const at::Tensor& from,
                                const at::Tensor& to) {
  std::string_view name = op.name;
  auto all = from.size(x.words);
  auto last = x.rows.dim() - 1;
  auto wrapped = [&](int64_t d) { return d < 0 ? d + x.rows.dim() : d; };
  if (copies(name, op.overload_name)) {
    // A narrower type would lose digits that the loss here has.
    auto widens = at::isFloatingType(to.scalar_type())
                  && to.element_size() >= from.element_size();
    return to.scalar_type() == from.scalar_type() || widens ? std::optional{x}
                                                            : std::nullopt;
  }
  if (to.scalar_type() != from.scalar_type())
    return std::nullopt;
  if (keeps_order(name)) {
    if (x.words != last || to.dim() == 0 || to.size(-1) != all)
      return std::nullopt;
    auto sizes = to.sizes().vec();
    sizes.back() = 1;
    return selection{x.rows.reshape(sizes), to.dim() - 1};
  }
  if (name == "aten::permute") {
    auto order = args[1].toIntVector();
    for (size_t i = 0; i < order.size(); ++i)
      if (wrapped(order[i]) == x.words)
        return selection{x.rows.permute(order), static_cast<int64_t>(i)};
    return std::nullopt;
  }
  auto first = integer(args[1]);
  if (!first)
    return std::nullopt;
  auto dim = wrapped(*first);
  if (name == "aten::transpose") {
    auto second = integer(args[2]);
    if (!second)
      return std::nullopt;
    auto other = wrapped(*second);
    return selection{x.rows.transpose(dim, other), x.words == dim ? other
                                                   : x.words == other
                                                     ? dim
                                                     : x.words};
  }
  if (dim == x.words)
    return to.sizes() == from.sizes() ? std::optional{x} : std::nullopt;
  if (name == "aten::slice")
    return selection{
      x.rows.slice(dim, integer(args[2]), integer(args[3]), args[4].toInt()),
      x.words};
  auto begin = integer(args[2]);
  return begin ? std::optional{selection{
           x.rows.narrow(dim, *begin, args[3].toInt()), x.words}}
               : std::nullopt;
}

// -- modes --------------------------------------------------------------------

/// The modes of the calling thread.
struct modes {
  call_context context = call_context::current();
  c10::impl::LocalDispatchKeySet keys = c10::impl::tls_local_dispatch_key_set();
};

/// Puts the calling thread into these modes, also where code below autograd
/// reads, as `torch::ones_like` does.
class scoped_modes {
public:
  explicit scoped_modes(const modes& x) : keys_(x.keys), context_(x.context) {
    // nop
  }

private:
  struct without_inference {
    without_inference() {
      if (c10::InferenceMode::is_enabled())
        off.emplace(false);
    }

    std::optional<c10::InferenceMode> off;
  };

  without_inference inference_;
  c10::impl::ForceDispatchKeyGuard keys_;
  scoped_context context_;
};

// -- views --------------------------------------------------------------------

ag::ViewInfo copy_of(const ag::ViewInfo& x) {
  return {x.base_, x.view_fn_ ? x.view_fn_->clone_and_set() : nullptr,
          x.rev_view_fn_};
}

/// Makes `x`, which shares the memory of `view`, a view of the same tensor, so
/// that in-place changes of either are those of both for autograd, too. What
/// gradients of `x` reach until then stays, with its hooks.
void become_view(const at::Tensor& x, const at::Tensor& view) {
  auto* as = ag::impl::get_view_autograd_meta(view);
  if (!as)
    return; // an operation that copied
  using info = std::optional<ag::ViewInfo>;
  auto backward = as->has_bw_view() ? info{copy_of(as->get_backward_view())}
                                    : info{};
  auto forward = as->has_fw_view() && !as->shared_view_info()
                   ? info{copy_of(as->get_forward_view())}
                   : info{};
  auto* impl = x.unsafeGetTensorImpl();
  auto made_by = backward ? as->get_creation_meta() : ag::CreationMeta::DEFAULT;
  auto meta = std::make_unique<ag::DifferentiableViewMeta>(
    impl, std::move(backward), std::move(forward), as->shared_view_info(),
    made_by);
  auto* before = ag::impl::materialize_autograd_meta(x);
  meta->name_ = before->name_;
  meta->grad_fn_ = before->grad_fn_;
  meta->output_nr_ = before->output_nr_;
  meta->hooks_ = std::move(before->hooks_);
  meta->cpp_hooks_list_ = before->cpp_hooks_list_;
  meta->retains_grad_ = before->retains_grad_;
  impl->set_autograd_meta(std::move(meta));
}

// -- late logits --------------------------------------------------------------

class late_logits;

/// The logits of one call, and all that was selected from them.
struct family {
  std::shared_ptr<logits_source> source;
  std::vector<std::weak_ptr<late_logits>> members; // parents before children
};

class late_logits final : public promise_source,
                          public std::enable_shared_from_this<late_logits> {
public:
  late_logits(std::shared_ptr<family> all, at::Tensor like, selection rows)
    : family_(std::move(all)), like_(std::move(like)), rows_(std::move(rows)) {
    // nop
  }

  /// @param to what its gradients reach later, null: it has none
  /// @returns the tensor that stands for it
  at::Tensor handle(const std::optional<ag::Edge>& to) {
    family_->members.push_back(weak_from_this());
    auto sizes = like_.sizes().vec();
    auto result = make_promise(shared_from_this(), like_.scalar_type(), &sizes,
                               rank_context::current_device());
    handle_ = weak_tensor{result.getIntrusivePtr()};
    if (to) {
      node_ = std::shared_ptr<late_node>(new late_node, ag::deleteNode);
      // For its place in the order of nodes, which cannot change later.
      node_->add_next_edge(*to);
      auto nr = node_->add_input_metadata(result.options(), like_.sym_sizes(),
                                          false, false, like_.scalar_type());
      ag::impl::set_gradient_edge(result, {node_, nr});
    }
    family_->source->made(result);
    return result;
  }

  /// @returns the result of `op` if that needs no logits
  std::optional<at::Tensor> compute(const c10::OperatorHandle& op,
                                    arguments args) {
    if (real_.defined() || has_hooks())
      return std::nullopt;
    auto& name = op.operator_name();
    if (name.name == "aten::cross_entropy_loss")
      return loss(args);
    return is_selection(name) ? derived(op, args) : std::nullopt;
  }

  /// Makes it an ordinary tensor. With it, everything selected from the same
  /// logits is made: what follows may write into them.
  void make_all() {
    for (auto& x : family_->members)
      if (auto member = x.lock())
        member->make();
    family_->members.clear();
  }

  /// Tells whether code wants to see the gradient of it, or of what it was
  /// selected from.
  bool has_hooks() const {
    return (node_
            && !(node_->tensor_pre_hooks().empty()
                 && node_->retains_grad_hooks().empty()))
           || (parent_ && parent_->has_hooks());
  }

  // -- of a promise -----------------------------------------------------------

  std::vector<int64_t> sizes() override {
    return like_.sizes().vec();
  }

  std::optional<std::vector<int64_t>> strides() override {
    return like_.is_contiguous() ? std::vector<int64_t>{}
                                 : like_.strides().vec();
  }

  completion_ptr content() override {
    auto result = std::make_shared<completion>();
    result->set();
    return result;
  }

  void wait() override {
    make_all(); // which gives the handle its content
  }

  at::Tensor take() override {
    return real_.detach();
  }

  wait_reason why() const override {
    return {.what = "logits", .from = {}};
  }

private:
  void make() {
    if (real_.defined())
      return;
    scoped_modes as_called{made_in_};
    if (!parent_) {
      settle(family_->source->logits());
    } else {
      parent_->make();
      auto stack = arguments_;
      stack[0] = parent_->real_;
      call_boxed(*operation_, stack);
      settle(stack.back().toTensor());
    }
  }

  /// @param x what an ordinary tensor would be
  void settle(const at::Tensor& x) {
    if (x.sizes() != like_.sizes() || x.scalar_type() != like_.scalar_type())
      throw error{error_code::internal,
                  "logits are not of the size or type "
                  "that they were expected to have"};
    if (node_ && x.requires_grad()) {
      // Not `set_next_edge`, which refuses once something leads to this node.
      node_->next_edges()[0] = ag::impl::gradient_edge(x);
      node_->found = true;
    }
    auto impl = handle_.lock();
    real_ = impl ? at::Tensor{std::move(impl)} : x;
    if (real_.is_same(x))
      return;
    keep_promise(real_, x.detach());
    if (parent_)
      become_view(real_, x);
  }

  std::optional<at::Tensor> derived(const c10::OperatorHandle& op,
                                    arguments args) {
    auto stack = args.vec();
    at::Tensor like;
    {
      at::AutoGradMode off{false};
      stack[0] = like_;
      call_boxed(op, stack);
      like = stack.back().toTensor();
    }
    if (like.is_same(like_)) // what is contiguous already, for example
      return args[0].toTensor();
    auto rows = select(rows_, op.operator_name(), args, like_, like);
    if (!rows)
      return std::nullopt;
    auto result = std::make_shared<late_logits>(family_, like,
                                                std::move(*rows));
    auto& grad = result->made_in_.context.grad;
    grad = grad && made_in_.context.grad;
    result->parent_ = shared_from_this();
    result->operation_ = op;
    result->arguments_ = args.vec();
    result->arguments_[0] = {};
    return result->handle(node_ && grad
                            ? std::optional<ag::Edge>{std::in_place, node_, 0}
                            : std::nullopt);
  }

  /// @param args of `cross_entropy_loss`
  std::optional<at::Tensor> loss(arguments args) {
    auto& labels = args[1].toTensor();
    auto how = args[3].toInt();
    auto mean = how == at::Reduction::Mean;
    if (!(args[2].isNone() || !args[2].toTensor().defined())
        || (!mean && how != at::Reduction::Sum) || args[5].toDouble() != 0
        || like_.dim() < 2 || rows_.words != 1
        || labels.scalar_type() != at::kLong
        || labels.sizes() != rows_.rows.squeeze(1).sizes())
      return std::nullopt;
    auto rows = rows_.rows.flatten();
    if (rows.numel() == 0)
      return std::nullopt;
    auto as = root().made_in_;
    as.context.grad = made_in_.context.grad && at::GradMode::is_enabled();
    auto given = call_context::current();
    auto result = [&] {
      scoped_modes as_called{as};
      auto all = rows.numel() == root().rows_.rows.numel()
                 && rows.equal(at::arange(rows.numel()));
      return family_->source->cross_entropy(
        all ? at::Tensor{} : rows, labels.flatten(), args[4].toInt(), mean);
    }();
    // Autocast computes losses in float32.
    auto dtype = given.autocast.empty() || like_.scalar_type() == at::kDouble
                   ? like_.scalar_type()
                   : at::kFloat;
    return result.to(dtype);
  }

  const late_logits& root() const {
    return parent_ ? parent_->root() : *this;
  }

  std::shared_ptr<family> family_;
  weak_tensor handle_{at::Tensor{}.getIntrusivePtr()};
  at::Tensor like_;
  selection rows_;
  modes made_in_;
  at::Tensor real_; // the handle, if that is still referenced
  std::shared_ptr<late_node> node_;
  /// What it was selected from, and how; null: these are the logits.
  std::shared_ptr<late_logits> parent_;
  std::optional<c10::OperatorHandle> operation_;
  std::vector<c10::IValue> arguments_;
};

std::shared_ptr<late_logits> late_logits_of(const at::Tensor& x) {
  return is_absent(x) ? std::dynamic_pointer_cast<late_logits>(source_of(x))
                      : nullptr;
}

} // namespace

at::Tensor make_late_logits(std::shared_ptr<logits_source> x,
                            const at::Tensor& like,
                            const std::optional<ag::Edge>& gradients) {
  auto all = std::make_shared<family>();
  all->source = std::move(x);
  auto sizes = like.sizes().vec();
  sizes.back() = 1;
  auto rows = at::arange(like.numel() / like.size(-1)).reshape(sizes);
  return std::make_shared<late_logits>(std::move(all), like,
                                       selection{rows, like.dim() - 1})
    ->handle(gradients);
}

void read_late_logits(const std::vector<at::Tensor>& xs) {
  for (auto& x : xs)
    if (auto late = late_logits_of(x))
      late->make_all();
}

bool run_without_logits(const c10::OperatorHandle& op,
                        torch::jit::Stack& stack) {
  auto count = op.schema().arguments().size();
  auto base = stack.size() - count;
  auto any = false;
  for (auto i = base; i < stack.size(); ++i)
    visit_tensors(stack[i], [&any](const at::Tensor& x) {
      any = any || late_logits_of(x) != nullptr;
    });
  if (!any)
    return false;
  if (auto first = stack[base].isTensor()
                     ? late_logits_of(stack[base].toTensor())
                     : nullptr)
    if (auto result = first->compute(op,
                                     arguments(stack.data() + base, count))) {
      torch::jit::drop(stack, count);
      stack.emplace_back(std::move(*result));
      return true;
    }
  for (auto i = base; i < stack.size(); ++i)
    visit_tensors(stack[i], [](const at::Tensor& x) {
      if (auto late = late_logits_of(x))
        late->make_all();
    });
  return false;
}

} // namespace smp
