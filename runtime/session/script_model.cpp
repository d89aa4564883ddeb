#include "runtime/session/script_model.hpp"

#include "runtime/base/out_of_memory.hpp"
#include "runtime/base/script_error_text.hpp"
#include "runtime/deferred/deferred_init.hpp"
#include "runtime/deferred/deferred_script.hpp"
#include "runtime/intercept/script/script_calls.hpp"
#include "runtime/intercept/trace/tracer.hpp"
#include "runtime/placement/partitioning.hpp"
#include "runtime/session/rank_runtime.hpp"

#include <caffe2/serialize/inline_container.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/jit/runtime/operator.h>
#include <torch/csrc/jit/serialization/import.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <regex>
#include <set>

namespace smp {

namespace {

namespace jit = torch::jit;

constexpr const char* how_to_export
  = "export it with torch.jit.script(model) or torch.jit.trace(model, inputs) "
    "and .save(path), and do not freeze it (docs/torchscript.md)";

[[noreturn]] void refuse(const std::string& path, const std::string& why) {
  throw error{error_code::config,
              "'" + path + "' " + why + ": " + how_to_export};
}

/// @throws error if the file is not an archive that `torch.jit.save` wrote
void check_archive(const std::string& path) {
  if (!std::filesystem::is_regular_file(path))
    throw error{error_code::config,
                "cannot read the model '" + path + "': no such file"};
  char magic[4] = {};
  std::ifstream{path, std::ios::binary}.read(magic, sizeof(magic));
  if (std::string_view{magic, 2} != "PK")
    refuse(path, "is not a TorchScript file");
  std::vector<std::string> entries;
  try {
    entries = caffe2::serialize::PyTorchStreamReader{path}.getAllRecords();
  } catch (const std::exception&) {
    refuse(path, "is a damaged archive");
  }
  // Only at the top: a Python package "models" gives code/__torch__/models/.
  auto has = [&entries](std::string_view prefix) {
    return std::any_of(entries.begin(), entries.end(),
                       [&](auto& x) { return x.starts_with(prefix); });
  };
  if (has("models/") || has("archive_format") || has("serialized_exported"))
    refuse(path, "is a torch.export archive (.pt2), which has no module tree");
  if (!has("code/") || !has("constants.pkl"))
    refuse(path,
           "has tensors but no code (torch.save of a module or state "
           "dict)");
}

/// @returns operators of other libraries that the code calls and nobody
/// registered: "torchvision::nms, ..."
std::string missing_operators(const std::string& path) {
  std::set<std::string> names;
  // Not of a module of Python, as in __torch__.torchvision.ops.boxes.nms().
  const std::regex call{R"((?:^|[^.\w])ops\.([A-Za-z_]\w*)\.([A-Za-z_]\w*)\()"};
  caffe2::serialize::PyTorchStreamReader reader{path};
  for (auto& entry : reader.getAllRecords()) {
    if (!entry.starts_with("code/") || !entry.ends_with(".py"))
      continue;
    auto [data, size] = reader.getRecord(entry);
    std::string code{static_cast<const char*>(data.get()), size};
    for (std::sregex_iterator i{code.begin(), code.end(), call}, end; i != end;
         ++i)
      if ((*i)[1] != "prim" && (*i)[1] != "aten")
        names.insert((*i)[1].str() + "::" + (*i)[2].str());
  }
  std::erase_if(names, [](const std::string& x) {
    return !jit::getAllOperatorsFor(c10::Symbol::fromQualString(x)).empty();
  });
  return fmt::format("{}", fmt::join(names, ", "));
}

bool has_calls(const jit::Block& x) {
  for (auto* node : x.nodes()) {
    if (node->kind() == c10::prim::CallMethod
        || node->kind() == c10::prim::fork)
      return true;
    for (auto* block : node->blocks())
      if (has_calls(*block))
        return true;
  }
  return false;
}

/// @throws error if there is nothing that could be placed separately
void check_tree(const std::string& path, const jit::Module& x) {
  if (x.parameters(true).size() == 0)
    refuse(path, "has no parameters, as a frozen module");
  auto method = x.find_method("forward");
  if (!method)
    refuse(path, "has no method forward");
  auto children = false;
  for (auto child : x.children())
    children = children || child.find_method("forward");
  if (children && !has_calls(*method->graph()->block()))
    refuse(path,
           "has no call of a module left in its forward, as after "
           "inlining");
}

} // namespace

torch::jit::Module load_script(const std::string& path) {
  check_archive(path);
  auto result = [&] {
    try {
      return in_deferred_scope() ? load_deferred_script(path)
                                 : jit::load(path, c10::kCPU);
    } catch (const std::exception& err) {
      if (is_out_of_memory(err.what()))
        throw error{error_code::config,
                    "no memory for all of '" + path
                      + "': with smp.trace_device = \"none\", in C++ in a "
                        "smp::delay_param_initialization scope, a rank reads "
                        "only what it owns (docs/large_models.md)"};
      if (auto names = missing_operators(path); !names.empty())
        throw error{error_code::config,
                    "'" + path + "' calls " + names
                      + ", which LibTorch does not have: name the libraries "
                        "that register it in model.operator_libraries, or load "
                        "them first in a program of your own "
                        "(docs/torchscript.md)"};
      refuse(path, "cannot be loaded (" + script_error_text(err.what()) + ")");
    }
  }();
  check_tree(path, result);
  return result;
}

at::Tensor loss_of(const c10::IValue& x) {
  if (x.isTensor())
    return x.toTensor();
  if (x.isTuple() && !x.toTupleRef().elements().empty()
      && x.toTupleRef().elements()[0].isTensor())
    return x.toTupleRef().elements()[0].toTensor();
  throw error{error_code::unsupported,
              "the model returned " + x.type()->repr_str()
                + " instead of its loss, or a tuple that begins with it"};
}

void set_partition(const torch::jit::Module& x, uint32_t pp_rank) {
  const void* module = x._ivalue().get();
  session::current()
    .internals()
    .marks_for(module, "smp::set_partition")
    .pins[module]
    = pp_rank;
}

void set_tensor_parallelism(const torch::jit::Module& x, bool enabled,
                            const tensor_parallel_config& how) {
  const void* module = x._ivalue().get();
  session::current()
    .internals()
    .marks_for(module, "smp::set_tensor_parallelism")
    .sharing[module]
    = make_sharing_mark(enabled, how);
}

distributed_model<torch::jit::Module>::distributed_model(
  torch::jit::Module model)
  : distributed_model_base(model_root{{}, model._ivalue()}),
    model_(std::make_unique<torch::jit::Module>(std::move(model))) {
  // nop
}

distributed_model<torch::jit::Module>::~distributed_model() = default;

c10::IValue
distributed_model<torch::jit::Module>::run(const std::string& method,
                                           std::vector<c10::IValue> args) {
  traced_model_call call;
  while (call.again()) {
    auto copies = args; // a model may change its input
    for (auto& x : copies)
      if (x.isTensor())
        x = x.toTensor().clone();
    run_method(model_->_ivalue(), method, std::move(copies));
  }
  return run_method(model_->_ivalue(), method, std::move(args));
}

} // namespace smp
