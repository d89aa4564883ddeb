#include "runtime/model/native_modules.hpp"

#include "runtime/model/script_code.hpp"
#include "runtime/model/tp_register.hpp"

#include <ATen/core/function.h>
#include <ATen/core/ivalue.h>
#include <c10/util/Type.h>
#include <torch/csrc/jit/api/function_impl.h>
#include <torch/csrc/jit/ir/constants.h>
#include <torch/csrc/jit/ir/ir.h>
#include <torch/nn/modules/embedding.h>

#include <map>
#include <mutex>
#include <set>
#include <string_view>

namespace smp {

namespace {

namespace jit = torch::jit;

/// What users say of their classes, by type.
struct registry {
  std::mutex mutex;
  std::map<std::string, std::string, std::less<>> names;

  static registry& get() {
    static registry result;
    return result;
  }
};

/// @returns "Linear" of "torch::nn::LinearImpl" and of
/// "torch.nn.modules.linear.Linear", "Conv1D" of that of Hugging Face; else
/// nothing
std::string name_of_class(std::string_view type) {
  constexpr std::string_view in_cpp = "torch::nn::";
  constexpr std::string_view suffix = "Impl";
  constexpr std::string_view in_python = "torch.nn.modules.";
  {
    auto& known = registry::get();
    std::lock_guard guard{known.mutex};
    if (auto i = known.names.find(type); i != known.names.end())
      return i->second;
  }
  if (type.starts_with(in_cpp) && type.ends_with(suffix)) {
    type.remove_prefix(in_cpp.size());
    type.remove_suffix(suffix.size());
    return std::string{type};
  }
  if (type.starts_with(in_python)
      || type == "transformers.pytorch_utils.Conv1D")
    return std::string{type.substr(type.rfind('.') + 1)};
  return {};
}

void read_options(const torch::nn::EmbeddingOptions& x, native_module& to) {
  to.padding_idx = x.padding_idx();
  to.sparse = x.sparse();
  to.max_norm = x.max_norm().has_value();
  to.scale_grad_by_freq = x.scale_grad_by_freq();
}

// -- TorchScript --------------------------------------------------------------

/// What the code of such a class does, scripted or traced, and nothing else:
/// an export may have put more into it.
const std::set<std::string_view>& operations_of(std::string_view type) {
  static const std::set<std::string_view> linear{"aten::linear"};
  static const std::set<std::string_view> embedding{"aten::embedding"};
  static const std::set<std::string_view> conv1d{
    "aten::addmm",       "aten::view",         "aten::size", "aten::Int",
    "aten::slice",       "aten::add",          "aten::len",  "aten::neg",
    "prim::NumToTensor", "prim::ListConstruct"};
  static const std::set<std::string_view> none;
  return type == "Linear"      ? linear
         : type == "Embedding" ? embedding
         : type == "Conv1D"    ? conv1d
                               : none;
}

const jit::Graph* graph_of_forward(const c10::ivalue::Object& x) {
  auto* f = x.type()->findMethod(std::string{kept_prefix} + "forward");
  if (!f)
    f = x.type()->findMethod("forward");
  auto* code = f ? jit::tryToGraphFunction(*f) : nullptr;
  return code ? code->graph().get() : nullptr;
}

c10::IValue constant_of(const jit::Node& x, size_t input) {
  if (input < x.inputs().size())
    if (auto y = jit::toIValue(x.input(input)))
      return *y;
  return {};
}

/// Options of an embedding are constants in traced code.
void read_call(const jit::Node& x, native_module& to) {
  if (auto y = constant_of(x, 2); y.isInt() && y.toInt() >= 0)
    to.padding_idx = y.toInt();
  if (auto y = constant_of(x, 3); y.isBool())
    to.scale_grad_by_freq = y.toBool();
  if (auto y = constant_of(x, 4); y.isBool())
    to.sparse = y.toBool();
}

/// Attributes and constants of a scripted Embedding.
void read_options(const c10::ivalue::Object& x, native_module& to) {
  auto attribute = [&x](const char* name) {
    if (auto i = x.type()->findAttributeSlot(name))
      return x.getSlot(*i);
    if (x.type()->findConstantSlot(name))
      return x.type()->getConstant(name);
    return c10::IValue{};
  };
  if (auto y = attribute("padding_idx"); y.isInt())
    to.padding_idx = y.toInt();
  if (auto y = attribute("sparse"); y.isBool())
    to.sparse = y.toBool();
  to.max_norm = !attribute("max_norm").isNone();
  if (auto y = attribute("scale_grad_by_freq"); y.isBool())
    to.scale_grad_by_freq = y.toBool();
}

/// A scripted module calls the function of torch.nn.functional.
bool calls_functional(const jit::Node& x) {
  if (x.kind() != c10::prim::CallFunction)
    return false;
  auto type = x.input(0)->type()->cast<c10::FunctionType>();
  auto name = type ? type->function()->qualname().qualifiedName()
                   : std::string{};
  return name.ends_with("torch.nn.functional.embedding")
         || name.ends_with("torch.nn.functional.linear");
}

void read_code(const c10::ivalue::Object& x, native_module& to) {
  auto* graph = graph_of_forward(x);
  if (!graph || graph->inputs().size() != 2) {
    to.doubt = "its code does not take one tensor";
    return;
  }
  auto& known = operations_of(to.type);
  for (auto* node : graph->nodes()) {
    std::string_view kind = node->kind().toQualString();
    if (kind == "aten::embedding")
      read_call(*node, to);
    if (kind == "prim::GetAttr" || kind == "prim::Constant"
        || calls_functional(*node) || known.contains(kind))
      continue;
    to.doubt = "its code does more than that of its class: "
               + std::string{kind};
    return;
  }
}

} // namespace

bool register_native(const std::type_info& impl, std::string_view as) {
  auto& known = registry::get();
  std::lock_guard guard{known.mutex};
  known.names.insert_or_assign(c10::demangle(impl.name()), std::string{as});
  return true;
}

std::optional<native_module> native_of(const walked_model& model,
                                       uint32_t module) {
  auto& m = model.modules[module];
  native_module result;
  result.type = name_of_class(m.type);
  if (result.type.empty() || !find_distribution(result.type))
    return std::nullopt;
  for (auto i : m.tensors) {
    auto& t = model.tensors[i];
    auto& name = t.names.front();
    if (!t.is_buffer)
      result.parameters.emplace(name.substr(name.rfind('.') + 1), t.tensor);
  }
  if (auto* x = dynamic_cast<torch::nn::EmbeddingImpl*>(m.object))
    read_options(x->options, result);
  if (m.script && result.type == "Embedding")
    read_options(*m.script, result);
  if (m.script)
    read_code(*m.script, result);
  if (!result.parameters.contains("weight"))
    result.doubt = "it has no weight of its own";
  return result;
}

std::optional<uint32_t> own_tensor(const walked_model& model, uint32_t module,
                                   const std::string& name) {
  for (auto i : model.modules[module].tensors) {
    auto& whole = model.tensors[i].names.front();
    if (std::string_view{whole}.substr(whole.rfind('.') + 1) == name)
      return i;
  }
  return std::nullopt;
}

} // namespace smp
