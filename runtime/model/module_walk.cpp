#include "runtime/model/module_walk.hpp"

#include "runtime/base/fnv_hash.hpp"
#include "runtime/model/hook.hpp"
#include "runtime/model/module_type.hpp"
#include "runtime/model/native_facts.hpp"

#include <torch/nn/module.h>
#include <torch/nn/modules/container/moduledict.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/sequential.h>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <string_view>

namespace smp {

namespace {

foreign_module::contents contents_of(const torch::nn::Module& m) {
  foreign_module::contents result;
  for (auto& p : m.named_parameters(false))
    result.parameters.emplace_back(p.key(), p.value());
  for (auto& b : m.named_buffers(false))
    result.buffers.emplace_back(b.key(), b.value());
  for (auto& child : m.named_children())
    result.children.emplace_back(child.key(), child.value());
  return result;
}

/// Walks in pre-order; positions in the result are ids.
class walker {
public:
  walked_model run(torch::nn::Module& root) {
    visit(root, "", 0);
    return std::move(result_);
  }

private:
  uint32_t visit(torch::nn::Module& m, const std::string& path,
                 uint32_t parent) {
    // `Module` is a virtual base: the complete object is the identity.
    auto* identity = dynamic_cast<const void*>(&m);
    auto [i, added] = result_.module_index.emplace(
      identity, static_cast<uint32_t>(result_.modules.size()));
    auto id = i->second;
    if (!added) {
      // Known under another name: its children have other names, too, which
      // only matter for the tensors.
      result_.modules[id].names.push_back(path);
      return id;
    }
    auto& x = result_.modules.emplace_back();
    x.names.push_back(path);
    x.type = type_for_user(m.name());
    x.object = &m;
    x.facts = facts_of(m);
    x.parent = parent;
    x.intercepted = dynamic_cast<hook_base*>(&m);
    auto* foreign = dynamic_cast<foreign_module*>(&m);
    x.container = (foreign && foreign->is_container())
                  || dynamic_cast<torch::nn::ModuleListImpl*>(&m)
                  || dynamic_cast<torch::nn::ModuleDictImpl*>(&m)
                  || dynamic_cast<torch::nn::SequentialImpl*>(&m);
    x.sequential = (foreign && foreign->is_sequential())
                   || dynamic_cast<torch::nn::SequentialImpl*>(&m);
    auto inside = foreign ? foreign->find() : contents_of(m);
    for (auto& [name, p] : inside.parameters)
      add(id, path, name, p, false);
    for (auto& [name, b] : inside.buffers)
      add(id, path, name, b, true);
    for (auto& [name, child] : inside.children) {
      auto child_id = visit(*child, path.empty() ? name : path + "." + name,
                            id);
      result_.modules[id].children.push_back(child_id);
    }
    if (result_.modules[id].sequential)
      for (auto child : result_.modules[id].children)
        result_.modules[child].intercepted = true;
    return id;
  }

  void add(uint32_t module, const std::string& path, const std::string& key,
           const at::Tensor& t, bool is_buffer) {
    if (!t.defined())
      return;
    auto name = path.empty() ? key : path + "." + key;
    auto [i, added] = result_.tensor_index.emplace(
      t.unsafeGetTensorImpl(), static_cast<uint32_t>(result_.tensors.size()));
    if (added) {
      auto& x = result_.tensors.emplace_back();
      x.tensor = t;
      x.is_buffer = is_buffer;
    }
    auto& x = result_.tensors[i->second];
    x.names.push_back(name);
    x.modules.push_back(module);
    result_.modules[module].tensors.push_back(i->second);
  }

  walked_model result_;
};

} // namespace

const void* walked_module::identity() const {
  return object ? dynamic_cast<const void*>(object) : script;
}

int64_t walked_model::find(const at::Tensor& x) const {
  if (!x.defined())
    return -1;
  auto i = tensor_index.find(x.unsafeGetTensorImpl());
  return i == tensor_index.end() ? -1 : static_cast<int64_t>(i->second);
}

std::optional<uint32_t> walked_model::find_module(std::string_view name) const {
  for (uint32_t i = 0; i < modules.size(); ++i)
    if (std::ranges::find(modules[i].names, name) != modules[i].names.end())
      return i;
  return std::nullopt;
}

std::string walked_model::existing_near(std::string name) const {
  std::optional<uint32_t> parent;
  while (!parent) {
    auto dot = name.rfind('.');
    name.resize(dot == std::string::npos ? 0 : dot);
    parent = find_module(name);
  }
  std::vector<std::string_view> children;
  for (auto child : modules[*parent].children) {
    std::string_view x = modules[child].names.front();
    children.push_back(x.substr(x.rfind('.') + 1));
  }
  auto where = name.empty() ? "the model" : "'" + name + "'";
  return children.empty()
           ? where + " has no modules in it"
           : fmt::format("{} has {}", where, fmt::join(children, ", "));
}

std::vector<uint32_t> walked_model::modules_below(std::string_view name) const {
  std::vector<uint32_t> result;
  if (!find_module(name))
    return result;
  auto is_in = [name](std::string_view x) {
    return x.starts_with(name)
           && (x.size() == name.size() || x[name.size()] == '.');
  };
  for (uint32_t i = 0; i < modules.size(); ++i)
    if (std::ranges::any_of(modules[i].names, is_in))
      result.push_back(i);
  return result;
}

std::vector<uint32_t> walked_model::subtree(uint32_t module) const {
  std::vector<uint32_t> result{module};
  for (size_t i = 0; i < result.size(); ++i)
    for (auto child : modules[result[i]].children)
      if (std::ranges::find(result, child) == result.end())
        result.push_back(child);
  return result;
}

uint64_t walked_model::hash() const {
  fnv_hash h;
  for (auto& m : modules) {
    for (auto& name : m.names)
      h.add(name);
    h.add(m.type);
    h.add(m.tensors.size());
    for (auto t : m.tensors)
      h.add(t);
  }
  for (auto& t : tensors) {
    for (auto& name : t.names)
      h.add(name);
    h.add(static_cast<uint64_t>(t.tensor.scalar_type()));
    h.add(t.is_buffer);
    for (auto n : t.tensor.sizes())
      h.add(static_cast<uint64_t>(n));
  }
  return h.get();
}

walked_model walk(torch::nn::Module& root) {
  return walker{}.run(root);
}

} // namespace smp
