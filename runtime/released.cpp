#include "runtime/released.hpp"

#include "runtime/engine.hpp"
#include "runtime/execution.hpp"
#include "runtime/model_state.hpp"

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/TensorImpl.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <string_view>

namespace smp {

namespace {

// Free in LibTorch 2.11: nothing else registers a fallback for it, and it
// ranks above autograd and autocast, so that the fetched value meets both.
constexpr auto released_key = c10::DispatchKey::TESTING_ONLY_GenericWrapper;

/// `key_set_` is protected; a derived class may name it.
struct key_access : c10::TensorImpl {
  static constexpr auto key_set() {
    return &key_access::key_set_;
  }
};

/// Operations that only read sizes and types need no bytes.
bool reads_metadata_only(std::string_view name) {
  static constexpr std::array<std::string_view, 12> names = {
    "aten::size",         "aten::stride",       "aten::dim",
    "aten::numel",        "aten::sym_size",     "aten::sym_numel",
    "aten::sym_stride",   "aten::is_same_size", "aten::is_floating_point",
    "aten::is_complex",   "aten::is_signed",    "aten::retains_grad",
  };
  return std::find(names.begin(), names.end(), name) != names.end();
}

[[noreturn]] void refuse_write(const at::Tensor& x, const std::string& op) {
  auto& st = *session::current().internals().model();
  auto index = static_cast<uint32_t>(st.model().find(x));
  auto* ex = execution::current();
  throw error{failure{error_code::unsupported,
                      session::current().internals().self(),
                      ex ? ex->module_path : std::string{},
                      "in-place " + op + " changes '" + st.tensor_name(index)
                        + "', which rank "
                        + std::to_string(st.tensor_owner(index).value)
                        + " owns; change it inside the module that owns it"}};
}

void fetch_arguments(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                     torch::jit::Stack* stack) {
  auto& name = op.operator_name().name;
  if (!reads_metadata_only(name)) {
    auto& args = op.schema().arguments();
    auto base = stack->size() - args.size();
    for (size_t i = 0; i < args.size(); ++i) {
      auto& x = (*stack)[base + i];
      auto writes = args[i].alias_info() && args[i].alias_info()->isWrite();
      auto resolve = [&](const at::Tensor& t) {
        if (!is_released(t))
          return t;
        if (writes)
          refuse_write(t, name);
        return materialise(t);
      };
      if (x.isTensor()) {
        if (is_released(x.toTensor()))
          x = resolve(x.toTensor());
      } else if (x.isTensorList()) {
        auto xs = x.toTensorVector();
        if (std::any_of(xs.begin(), xs.end(), is_released)) {
          c10::List<at::Tensor> ys;
          for (auto& t : xs)
            ys.push_back(resolve(t));
          x = ys;
        }
      } else if (x.isOptionalTensorList()) {
        c10::List<std::optional<at::Tensor>> ys;
        for (std::optional<at::Tensor> t : x.toOptionalTensorList())
          ys.push_back(t ? std::optional{resolve(*t)} : t);
        x = ys;
      }
    }
  }
  auto after = c10::DispatchKeySet{c10::DispatchKeySet::FULL_AFTER,
                                   released_key};
  op.redispatchBoxed(keys & after, stack);
}

} // namespace

void release_tensor(const at::Tensor& x) {
  auto* impl = x.unsafeGetTensorImpl();
  auto nothing = c10::Storage{c10::Storage::use_byte_size_t{}, 0,
                              c10::GetCPUAllocator(), true};
  x.mutable_grad() = at::Tensor{};
  impl->set_storage_keep_dtype(std::move(nothing));
  impl->*key_access::key_set() = impl->key_set().add(released_key);
}

bool is_released(const at::Tensor& x) {
  return x.defined() && x.key_set().has(released_key);
}

at::Tensor materialise(const at::Tensor& x) {
  if (!is_released(x))
    return x;
  auto* s = session::current_or_null();
  auto st = s ? s->internals().model() : nullptr;
  auto index = st ? st->model().find(x) : -1;
  if (index < 0)
    throw error{error_code::unsupported,
                "a parameter that another rank owned is read after its session "
                "or model ended"};
  return st->fetch(static_cast<uint32_t>(index));
}

} // namespace smp

TORCH_LIBRARY_IMPL(_, TESTING_ONLY_GenericWrapper, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&smp::fetch_arguments>());
}
