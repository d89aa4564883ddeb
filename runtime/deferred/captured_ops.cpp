#include "runtime/deferred/captured_ops.hpp"

#include "runtime/base/large_block_allocator.hpp"
#include "runtime/deferred/boxed_arguments.hpp"

#include <c10/core/AutogradState.h>
#include <c10/core/DefaultDtype.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <numeric>
#include <optional>
#include <unordered_map>
#include <utility>

namespace smp {

namespace {

/// Restores the captured part of a thread's state that operations look at.
class captured_state {
public:
  explicit captured_state(const captured_op& x)
    : modes_(x.modes), dtype_(c10::get_default_dtype()) {
    if (dtype_ != x.default_dtype)
      c10::set_default_dtype(x.default_dtype);
    if (x.numbers) {
      numbers_ = *x.numbers;
      numbers_->swap_with_default();
    }
  }

  ~captured_state() {
    if (numbers_)
      numbers_->swap_with_default();
    if (dtype_ != c10::get_default_dtype())
      c10::set_default_dtype(dtype_);
  }

  captured_state(const captured_state&) = delete;
  captured_state& operator=(const captured_state&) = delete;

private:
  c10::impl::ForceDispatchKeyGuard modes_;
  caffe2::TypeMeta dtype_;
  std::optional<random_stream> numbers_;
};

/// Clones generators: use advances them, and the operation may run again.
void keep_generators(torch::jit::Stack& arguments) {
  for (auto& argument : arguments)
    if (argument.isGenerator() && argument.toGenerator().defined())
      argument = argument.toGenerator().clone();
}

/// @returns the results of `x`
/// @param value takes a `captured_tensor` and returns its value
template <class F>
torch::jit::Stack run(const captured_op& x, F value) {
  auto stack = x.arguments;
  for (auto& hole : x.holes) {
    auto& argument = stack[hole.argument];
    if (argument.isTensor()) {
      argument = value(hole.tensor);
    } else if (argument.isTensorList()) {
      // Lists are shared: copy it before the change.
      auto xs = argument.toTensorList().copy();
      xs.set(hole.element, value(hole.tensor));
      argument = xs;
    } else {
      auto xs = argument.toOptionalTensorList().copy();
      xs.set(hole.element, std::optional<at::Tensor>{value(hole.tensor)});
      argument = xs;
    }
  }
  keep_generators(stack);
  captured_state state{x};
  call_boxed(x.op, stack);
  return stack;
}

class replayer {
public:
  explicit replayer(const std::vector<wanted_tensor>& xs) : wanted_(xs) {
    collect();
    group();
  }

  void run_all(const std::function<void(size_t, at::Tensor)>& f) {
    c10::AutoGradMode no_grad{false};
    large_block_allocator apart;
    std::optional<c10::InferenceMode> ordinary;
    if (c10::InferenceMode::is_enabled())
      ordinary.emplace(false);
    for (auto& [first, members] : groups_)
      run_group(members, f);
  }

private:
  using tensor_key = std::pair<const captured_op*, uint32_t>;

  struct group_members {
    std::vector<const captured_op*> ops; // in order
    std::vector<size_t> wanted;          // positions in `wanted_`
  };

  struct live_tensor {
    size_t uses = 0;
    at::Tensor value;
  };

  template <class F>
  static void for_each_dependency(const captured_op& x, F f) {
    for (auto& hole : x.holes)
      f(hole.tensor.op.get());
    for (auto& y : x.before)
      f(y.get());
  }

  /// Finds the needed operations, in program order.
  void collect() {
    std::vector<const captured_op*> todo;
    auto add = [&](const captured_op* x) {
      if (x && positions_.emplace(x, 0).second) {
        ops_.push_back(x);
        todo.push_back(x);
      }
    };
    for (auto& x : wanted_) {
      add(x.tensor.op.get());
      add(x.last_write.get());
    }
    while (!todo.empty()) {
      auto* x = todo.back();
      todo.pop_back();
      for_each_dependency(*x, add);
    }
    std::sort(ops_.begin(), ops_.end(),
              [](auto* x, auto* y) { return x->number < y->number; });
    for (size_t i = 0; i < ops_.size(); ++i)
      positions_[ops_[i]] = i;
  }

  /// Divides them into connected components (union-find).
  void group() {
    std::vector<size_t> parents(ops_.size());
    std::iota(parents.begin(), parents.end(), size_t{0});
    auto find = [&](size_t x) {
      while (parents[x] != x)
        x = parents[x] = parents[parents[x]];
      return x;
    };
    auto join = [&](const captured_op* x, const captured_op* y) {
      auto a = find(positions_.at(x)), b = find(positions_.at(y));
      parents[std::max(a, b)] = std::min(a, b);
    };
    for (auto* x : ops_)
      for_each_dependency(*x, [&](const captured_op* y) { join(x, y); });
    for (auto& x : wanted_)
      if (x.last_write)
        join(x.tensor.op.get(), x.last_write.get());
    for (size_t i = 0; i < ops_.size(); ++i)
      groups_[find(i)].ops.push_back(ops_[i]);
    for (size_t i = 0; i < wanted_.size(); ++i)
      groups_[find(positions_.at(wanted_[i].tensor.op.get()))].wanted.push_back(
        i);
  }

  void run_group(const group_members& x,
                 const std::function<void(size_t, at::Tensor)>& f) {
    std::map<tensor_key, live_tensor> live;
    auto key = [](const captured_tensor& t) {
      return tensor_key{t.op.get(), t.index};
    };
    for (auto* op : x.ops)
      for (auto& hole : op->holes)
        ++live[key(hole.tensor)].uses;
    for (auto i : x.wanted)
      ++live[key(wanted_[i].tensor)].uses;
    for (auto* op : x.ops) {
      auto results = flatten_tensors(run(
        *op, [&](const captured_tensor& t) { return live.at(key(t)).value; }));
      for (uint32_t i = 0; i < results.size(); ++i)
        if (auto t = live.find({op, i}); t != live.end())
          t->second.value = std::move(results[i]);
      for (auto& hole : op->holes)
        if (auto t = live.find(key(hole.tensor)); --t->second.uses == 0)
          live.erase(t);
    }
    for (auto i : x.wanted)
      f(i, live.at(key(wanted_[i].tensor)).value);
  }

  const std::vector<wanted_tensor>& wanted_;
  std::vector<const captured_op*> ops_; // in order
  std::unordered_map<const captured_op*, size_t> positions_;
  std::map<size_t, group_members> groups_; // by first operation
};

} // namespace

captured_op::captured_op(c10::OperatorHandle op, torch::jit::Stack arguments)
  : op(std::move(op)),
    arguments(std::move(arguments)),
    modes(c10::impl::tls_local_dispatch_key_set()),
    default_dtype(c10::get_default_dtype()) {
  static std::atomic<uint64_t> count = 0;
  number = ++count;
}

captured_op::~captured_op() {
  std::vector<captured_op_ptr> doomed;
  auto take = [&doomed](captured_op& x) {
    for (auto& hole : x.holes)
      doomed.push_back(std::move(hole.tensor.op));
    std::move(x.before.begin(), x.before.end(), std::back_inserter(doomed));
    x.holes.clear();
    x.before.clear();
  };
  take(*this);
  while (!doomed.empty()) {
    auto x = std::move(doomed.back());
    doomed.pop_back();
    if (x && x.use_count() == 1)
      take(*x);
  }
}

std::vector<at::Tensor> flatten_tensors(const torch::jit::Stack& results) {
  std::vector<at::Tensor> flat;
  for (auto& x : results) {
    if (x.isTensor())
      flat.push_back(x.toTensor());
    else if (x.isTensorList())
      for (auto& y : x.toTensorVector())
        flat.push_back(y);
  }
  return flat;
}

void run_on(const captured_op& x,
            const std::function<
              void(const std::function<at::Tensor(const at::Tensor&)>&)>& f) {
  c10::AutoGradMode no_grad{false};
  auto arguments = x.arguments;
  keep_generators(arguments);
  captured_state state{x};
  f([&](const at::Tensor& y) {
    auto stack = arguments;
    stack.front() = y;
    call_boxed(x.op, stack);
    return stack.front().toTensor();
  });
}

void run_captured(const std::vector<wanted_tensor>& xs,
                  const std::function<void(size_t, at::Tensor)>& f) {
  if (!xs.empty())
    replayer{xs}.run_all(f);
}

} // namespace smp
