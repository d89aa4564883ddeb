#include "runtime/sharing/native_modules.hpp"

#include "runtime/model/module_facts.hpp"
#include "runtime/model/script_code.hpp"
#include "runtime/sharing/script_layers.hpp"
#include "runtime/sharing/tp_register.hpp"
#include "tp/distributions.hpp"
#include "tp/lm_head.hpp"
#include "tp/module_options.hpp"
#include "tp/transformer/transformer_layer_options.hpp"
#include "transport/error.hpp"

#include <ATen/core/function.h>
#include <ATen/core/ivalue.h>
#include <torch/csrc/jit/ir/constants.h>
#include <torch/csrc/jit/ir/ir.h>
#include <torch/nn/module.h>

#include <fmt/format.h>

#include <algorithm>
#include <exception>
#include <map>
#include <memory>
#include <set>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

namespace smp {

namespace {

namespace jit = torch::jit;

/// @returns "Linear" for "torch::nn::LinearImpl" and for
/// "torch.nn.modules.linear.Linear", "Conv1D" for that of Hugging Face;
/// else an empty text
std::string name_of_class(std::string_view type) {
  constexpr std::string_view in_cpp = "torch::nn::";
  constexpr std::string_view suffix = "Impl";
  constexpr std::string_view in_python = "torch.nn.modules.";
  if (auto as = registered_name(type))
    return *as;
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

void read_options(const module_facts& x, native_module& to) {
  to.doubt = x.differs_from_class();
  if (to.type == "LayerNorm") {
    if (auto y = x.option("normalized_shape"); y.isIntList())
      to.normalized_shape = y.toIntVector();
    if (auto y = x.option("eps"); y.isDouble())
      to.eps = y.toDouble();
  }
  if (to.type != "Embedding")
    return;
  if (auto y = x.option("padding_idx"); y.isInt())
    to.padding_idx = y.toInt();
  if (auto y = x.option("sparse"); y.isBool())
    to.sparse = y.toBool();
  if (auto y = x.option("max_norm"); y.isDouble())
    to.max_norm = y.toDouble();
  if (auto y = x.option("norm_type"); y.isDouble())
    to.norm_type = y.toDouble();
  if (auto y = x.option("scale_grad_by_freq"); y.isBool())
    to.scale_grad_by_freq = y.toBool();
}

// -- TorchScript --------------------------------------------------------------

/// All operations that the code of such a class may have, scripted or traced:
/// an export may have put more into it.
const std::set<std::string_view>& operations_of(std::string_view type) {
  static const std::set<std::string_view> linear{"aten::linear"};
  static const std::set<std::string_view> embedding{"aten::embedding"};
  static const std::set<std::string_view> conv1d{
    "aten::addmm",       "aten::view",         "aten::size", "aten::Int",
    "aten::slice",       "aten::add",          "aten::len",  "aten::neg",
    "prim::NumToTensor", "prim::ListConstruct"};
  static const std::set<std::string_view> norm{"aten::layer_norm",
                                               "prim::ListConstruct"};
  static const std::set<std::string_view> none;
  return type == "Linear"      ? linear
         : type == "Embedding" ? embedding
         : type == "Conv1D"    ? conv1d
         : type == "LayerNorm" ? norm
                               : none;
}

c10::IValue constant_of(const jit::Node& x, size_t input) {
  if (input < x.inputs().size())
    if (auto y = jit::toIValue(x.input(input)))
      return *y;
  return {};
}

/// The axes, and the epsilon added to the variance, are constants of the call.
/// @param first position of its first argument
void read_norm(const jit::Node& x, size_t first, native_module& to) {
  to.normalized_shape.clear();
  auto shape = x.input(first + 1);
  if (auto y = jit::toIValue(shape); y && y->isIntList())
    to.normalized_shape = y->toIntVector();
  else if (shape->node()->kind() == c10::prim::ListConstruct)
    for (size_t i = 0; i < shape->node()->inputs().size(); ++i)
      if (auto n = constant_of(*shape->node(), i); n.isInt())
        to.normalized_shape.push_back(n.toInt());
  if (auto y = constant_of(x, first + 4); y.isDouble())
    to.eps = y.toDouble();
  else
    to.doubt
      = "its code does not tell its epsilon; export it with a constant "
        "eps";
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

/// A scripted module calls the function of torch.nn.functional.
bool calls_functional(const jit::Node& x) {
  if (x.kind() != c10::prim::CallFunction)
    return false;
  auto type = x.input(0)->type()->cast<c10::FunctionType>();
  auto name = type ? type->function()->qualname().qualifiedName()
                   : std::string{};
  return name.ends_with("torch.nn.functional.embedding")
         || name.ends_with("torch.nn.functional.linear")
         || name.ends_with("torch.nn.functional.layer_norm");
}

/// Whether the code takes one tensor, apart from parameters of the module,
/// which traced code passes if other modules have them, too.
bool takes_one_tensor(const jit::Graph& graph) {
  auto inputs = graph.inputs().slice(1);
  return std::ranges::count_if(
           inputs, [](auto* x) { return !is_parameter_of_operation(*x); })
         == 1;
}

void read_code(const jit::Graph& graph, native_module& to) {
  if (!takes_one_tensor(graph)) {
    to.doubt
      = "its code does not take one tensor; export it as torch.nn has "
        "it";
    return;
  }
  auto& known = operations_of(to.type);
  for (auto* node : graph.nodes()) {
    std::string_view kind = node->kind().toQualString();
    if (kind == "aten::embedding")
      read_call(*node, to);
    if (to.type == "LayerNorm" && kind == "aten::layer_norm")
      read_norm(*node, 0, to);
    if (to.type == "LayerNorm" && calls_functional(*node))
      read_norm(*node, 1, to);
    if (kind == "prim::GetAttr" || kind == "prim::Constant"
        || calls_functional(*node) || known.contains(kind))
      continue;
    to.doubt = fmt::format(
      "its code does more than that of its class: {}; "
      "do that in the module around it",
      kind);
    return;
  }
}

bool same_options(const native_module& x, const native_module& y) {
  auto options = [](const native_module& z) {
    return std::tie(z.padding_idx, z.max_norm, z.norm_type, z.sparse,
                    z.scale_grad_by_freq, z.normalized_shape, z.eps);
  };
  return options(x) == options(y);
}

/// All calls of a shared module are shared, so the code of each must be
/// that of its class.
/// @param to what is known without the code
void read_calls(const c10::ClassType& x, native_module& to) {
  std::optional<native_module> first;
  for_each_method(x, [&](const std::string& name, const jit::Graph& graph) {
    if (!is_forward(name))
      return; // which differs from the class
    auto call = to;
    read_code(graph, call);
    if (!first)
      first = std::move(call);
    else if (!call.doubt.empty())
      first->doubt = std::move(call.doubt);
    else if (!same_options(call, *first))
      first->doubt = fmt::format(
        "'{}' in its code has other options than an earlier call; use two "
        "modules",
        name);
  });
  if (first)
    to = std::move(*first);
  else if (to.doubt.empty())
    to.doubt = "the file has no code of it, so nothing calls it";
}

/// A registered class, or one of a file, may have parameters that a module of
/// the type that it is shared as cannot use.
/// @returns what is wrong with them; empty: nothing
std::string doubt_of_parameters(const native_module& x) {
  for (auto& [name, t] : x.parameters)
    if (name != "weight" && (name != "bias" || x.type == "Embedding"))
      return fmt::format(
        "it has a parameter '{}' that no {} has; register "
        "its class with a distributed module of its own",
        name, x.type);
  auto weight = x.parameters.find("weight");
  auto bias = x.parameters.find("bias");
  if (x.type == "LayerNorm") {
    for (auto& [name, t] : x.parameters)
      if (!x.normalized_shape.empty() && t.sizes() != x.normalized_shape)
        return fmt::format("its {} is {}; it has to be {}", name,
                           c10::str(t.sizes()),
                           c10::str(at::IntArrayRef{x.normalized_shape}));
    return {};
  }
  if (weight == x.parameters.end())
    return "it has no weight of its own; register one in it";
  auto sizes = weight->second.sizes();
  if (sizes.size() != 2)
    return fmt::format("its weight is {}; it has to have two axes",
                       c10::str(sizes));
  auto outputs = sizes[x.type == "Conv1D" ? 1 : 0];
  if (bias != x.parameters.end() && bias->second.sizes() != outputs)
    return fmt::format("its bias is {}; it has to be [{}]",
                       c10::str(bias->second.sizes()), outputs);
  return {};
}

/// @returns the result of the init hook of its class for an object
native_module read_registered(const registered_class& x,
                              const walked_module& module) {
  try {
    return x.read(module);
  } catch (const std::exception& err) {
    throw config_error(
      fmt::format("tp_register: the init hook of {} failed "
                  "for '{}': {}",
                  module.type, module.names.front(), err.what()));
  }
}

/// Fills in a layer's training mode, and the containers that calls bypass.
void complete_layer(const walked_model& model, uint32_t module,
                    native_module& x) {
  auto options = *x.layer;
  if (!options.training)
    options.training = [facts = model.modules[module].facts] {
      return facts->is_training();
    };
  auto prefix = x.name + ".";
  for (auto below : model.subtree(module))
    if (auto& y = model.modules[below]; below != module && y.container)
      for (auto& name : y.names) // the first may be of another place
        if (name.starts_with(prefix))
          options.containers.insert(name.substr(prefix.size()));
  x.layer = std::make_shared<transformer_layer_options>(std::move(options));
}

void add_parameters_below(const walked_model& model, uint32_t module,
                          native_module& to) {
  auto prefix = to.name + ".";
  for (auto below : model.subtree(module))
    for (auto i : model.modules[below].tensors)
      for (auto& name : model.tensors[i].names)
        if (!model.tensors[i].is_buffer && name.starts_with(prefix))
          to.parameters.emplace(name.substr(prefix.size()),
                                model.tensors[i].tensor);
}

/// Gives parameters the names that modules of its type use.
void rename_parameters(native_module& x) {
  std::map<std::string, at::Tensor> result;
  for (auto& [name, own] : x.own_names)
    if (auto i = x.parameters.find(own); i != x.parameters.end())
      result.emplace(name, i->second);
    else if (name == "weight" && x.type != "LayerNorm")
      x.doubt = fmt::format(
        "its init hook tells of a parameter '{}', which "
        "it does not have; the hook has to name one of its own",
        own);
  for (auto& [name, t] : x.parameters)
    if (std::ranges::find(
          x.own_names, name, [](auto& y) -> auto& { return y.second; })
          == x.own_names.end()
        && x.doubt.empty())
      x.doubt = fmt::format(
        "its init hook does not tell of its parameter "
        "'{}'; a distributed module of its own could",
        name);
  x.parameters = std::move(result);
}

/// A module that is shared with everything below it: of a class that was
/// registered with an init hook, or a layer of a file.
std::optional<native_module> whole_module(const walked_model& model,
                                          uint32_t module) {
  auto& m = model.modules[module];
  native_module result;
  if (auto known = registration_of(m.type)) {
    result = read_registered(*known, m);
    result.name = m.names.front();
    if (result.doubt.empty())
      result.doubt = m.facts->differs_from_class();
    if (result.layer)
      complete_layer(model, module, result);
  } else if (m.script && is_script_layer(m.type)) {
    auto found = read_script_layer(model, module);
    result = described(found.options);
    result.name = m.names.front();
    result.doubt = std::move(found.doubt);
  } else {
    return std::nullopt;
  }
  add_parameters_below(model, module, result);
  if (!result.own_names.empty()) {
    rename_parameters(result);
    if (result.doubt.empty())
      result.doubt = doubt_of_parameters(result);
  }
  return result;
}

/// Tells whether the weight of a Linear is also the table of an Embedding, as
/// in the last layer of most language models.
bool is_tied_linear(const walked_model& model, uint32_t module) {
  auto is = [&model](uint32_t i, std::string_view type) {
    return name_of_class(model.modules[i].type) == type;
  };
  return is(module, "Linear")
         && std::ranges::any_of(model.modules[module].tensors, [&](auto i) {
              auto& t = model.tensors[i];
              return !t.is_buffer && t.tensor.dim() == 2
                     && std::ranges::any_of(t.modules, [&](auto other) {
                          return is(other, "Embedding");
                        });
            });
}

/// Tells whether a module is the last layer of a language model.
bool is_lm_head(const walked_model& model, uint32_t module) {
  auto& m = model.modules[module];
  auto known = registration_of(m.type);
  return known ? read_registered(*known, m).how == &nn::lm_head_distribution
               : is_tied_linear(model, module);
}

} // namespace

std::optional<native_module> native_of(const walked_model& model,
                                       uint32_t module) {
  if (auto whole = whole_module(model, module))
    return whole;
  auto& m = model.modules[module];
  native_module result;
  result.type = name_of_class(m.type);
  result.name = m.names.front();
  result.how = find_distribution(result.type);
  if (!result.how || result.how->of_layer)
    return std::nullopt;
  for (auto i : m.tensors) {
    auto& t = model.tensors[i];
    auto& name = t.names.front();
    if (!t.is_buffer)
      result.parameters.emplace(name.substr(name.rfind('.') + 1), t.tensor);
    result.by_words = result.by_words
                      || std::ranges::any_of(t.modules, [&](auto other) {
                           return other != module && is_lm_head(model, other);
                         });
  }
  read_options(*m.facts, result);
  if (m.script)
    read_calls(*m.script->type(), result);
  if (auto why = doubt_of_parameters(result); !why.empty())
    result.doubt = std::move(why);
  if (is_tied_linear(model, module)) {
    auto head = described(lm_head_options{});
    result.type = head.type;
    result.how = head.how;
    result.options = head.options;
  }
  return result;
}

std::optional<uint32_t> own_tensor(const walked_model& model, uint32_t module,
                                   const std::string& name) {
  auto prefix = model.modules[module].names.front();
  auto whole = prefix.empty() ? name : prefix + "." + name;
  for (auto below : model.subtree(module))
    for (auto i : model.modules[below].tensors)
      if (std::ranges::find(model.tensors[i].names, whole)
          != model.tensors[i].names.end())
        return i;
  return std::nullopt;
}

} // namespace smp
