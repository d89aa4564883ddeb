#include "runtime/model/script_walk.hpp"

#include "runtime/model/script_code.hpp"
#include "runtime/model/script_facts.hpp"

#include <algorithm>
#include <memory>
#include <unordered_set>

namespace smp {

namespace {

namespace iv = c10::ivalue;

bool is_module(const c10::IValue& x) {
  return x.isObject() && x.toObjectRef().type()->is_module();
}

/// Calls `f(child, attribute)` for every module in an attribute of `x`, also
/// if the attribute is of an interface type.
template <class F>
void for_each_child(const iv::Object& x, F&& f) {
  auto type = x.type();
  for (size_t i = 0; i < type->numAttributes(); ++i)
    if (auto& slot = x.slots()[i]; is_module(slot))
      f(*slot.toObject(), type->getAttributeName(i));
}

/// Calls `f` for every tensor in a value; skips modules.
void for_each_tensor(const c10::IValue& x,
                     const std::function<void(const at::Tensor&)>& f,
                     std::unordered_set<const void*>& seen) {
  if (x.isTensor()) {
    if (x.toTensor().defined())
      f(x.toTensor());
  } else if (x.isList()) {
    for (auto& item : x.toListRef())
      for_each_tensor(item, f, seen);
  } else if (x.isTuple()) {
    for (auto& item : x.toTupleRef().elements())
      for_each_tensor(item, f, seen);
  } else if (x.isGenericDict()) {
    for (auto& entry : x.toGenericDict()) {
      for_each_tensor(entry.key(), f, seen);
      for_each_tensor(entry.value(), f, seen);
    }
  } else if (x.isObject() && !is_module(x)
             && seen.insert(&x.toObjectRef()).second) {
    for (auto& slot : x.toObjectRef().slots())
      for_each_tensor(slot, f, seen);
  }
}

/// "__torch__.torch.nn.modules.linear.___torch_mangle_3.Linear" is a
/// "torch.nn.modules.linear.Linear" to its user.
std::string readable(const c10::ClassType& x) {
  std::string result;
  for (auto& atom : x.name()->atoms()) {
    if (atom == "__torch__" || atom.starts_with("___torch_mangle_"))
      continue;
    if (!result.empty())
      result += '.';
    result += atom;
  }
  return result;
}

class script_walker {
public:
  walked_model run(const script_object& root) {
    visit(*root, "", 0);
    add_tensors([](auto& type, size_t i) { return type.is_parameter(i); },
                false, false);
    add_tensors([](auto& type, size_t i) { return type.is_buffer(i); }, true,
                false);
    add_tensors(
      [](auto& type, size_t i) {
        return !type.is_parameter(i) && !type.is_buffer(i);
      },
      true, true);
    describe_code();
    return std::move(result_);
  }

private:
  uint32_t visit(iv::Object& m, const std::string& path, uint32_t parent) {
    auto [i, added] = result_.module_index.emplace(
      &m, static_cast<uint32_t>(result_.modules.size()));
    auto id = i->second;
    if (!added) {
      result_.modules[id].names.push_back(path);
      return id;
    }
    auto& x = result_.modules.emplace_back();
    x.names.push_back(path);
    x.type = readable(*m.type());
    x.script = &m;
    x.intercepted = true;
    x.parent = parent;
    for_each_child(m, [&](iv::Object& child, const std::string& attribute) {
      auto name = path.empty() ? attribute : path + "." + attribute;
      auto child_id = visit(child, name, id);
      result_.modules[id].children.push_back(child_id);
    });
    // A list of modules: its class has no code.
    result_.modules[id].container = m.type()->methods().empty();
    return id;
  }

  template <class Predicate>
  void add_tensors(Predicate wanted, bool is_buffer, bool is_attribute) {
    for (uint32_t id = 0; id < result_.modules.size(); ++id) {
      auto& m = *result_.modules[id].script;
      auto& path = result_.modules[id].names.front();
      auto& type = *m.type();
      std::unordered_set<const void*> seen;
      for (size_t i = 0; i < type.numAttributes(); ++i) {
        if (!wanted(type, i) || is_module(m.slots()[i]))
          continue;
        auto name = type.getAttributeName(i);
        if (!path.empty())
          name = path + "." + name;
        for_each_tensor(
          m.slots()[i],
          [&](const at::Tensor& t) {
            add(id, name, t, is_buffer, is_attribute);
          },
          seen);
      }
    }
  }

  void add(uint32_t module, const std::string& name, const at::Tensor& t,
           bool is_buffer, bool is_attribute) {
    auto [i, added] = result_.tensor_index.emplace(
      t.unsafeGetTensorImpl(), static_cast<uint32_t>(result_.tensors.size()));
    auto index = i->second;
    if (added) {
      auto& x = result_.tensors.emplace_back();
      x.tensor = t;
      x.is_buffer = is_buffer;
      x.is_attribute = is_attribute;
    }
    auto& x = result_.tensors[index];
    // A list of a module's own parameters gives them no further name.
    if (added || !is_attribute)
      x.names.push_back(name);
    if (auto& m = result_.modules[module].tensors;
        std::find(m.begin(), m.end(), index) == m.end()) {
      m.push_back(index);
      x.modules.push_back(module);
    }
  }

  /// What the classes' code tells about the modules.
  void describe_code() {
    script_code code{classes_of(result_)};
    for (auto& m : result_.modules) {
      m.facts = facts_of(script_object::reclaim_copy(m.script), code);
      auto* type = m.script->type().get();
      m.sequential = code.find_chain(type, "forward");
      if (auto& sets = code.sets(type); !sets.empty())
        m.stateful = "sets its attribute '" + *sets.begin() + "'";
      for (auto& access : code.outside_accesses(type))
        describe_access(m, code, access);
    }
  }

  void describe_access(walked_module& m, const script_code& code,
                       const outside_access& x) {
    auto* other = m.script;
    for (auto& attribute : x.path) {
      auto slot = other->type()->findAttributeSlot(attribute);
      if (!slot || !is_module(other->slots()[*slot]))
        return;
      other = other->slots()[*slot].toObject().get();
    }
    auto& name = result_.modules[result_.module_index.at(other)].names.front();
    if (x.writes) {
      m.stateful = "changes the attribute '" + x.attribute.second + "' of '"
                   + name + "'";
      return;
    }
    auto slot = other->type()->findAttributeSlot(x.attribute.second);
    if (!slot)
      return;
    std::unordered_set<const void*> seen;
    for_each_tensor(
      other->slots()[*slot],
      [&](const at::Tensor& t) {
        auto i = result_.find(t);
        if (i < 0)
          return;
        auto& read = result_.tensors[i];
        if (read.is_buffer && !x.path.empty())
          m.reads.push_back(static_cast<uint32_t>(i));
        if (!read.is_buffer && !is_only_passed(read, x))
          read.read_by = m.names.front();
      },
      seen);
    if (x.path.empty())
      return;
    if (code.is_mutable(x.attribute) && !other->slots()[*slot].isTensor())
      m.stateful = "reads the attribute '" + x.attribute.second + "' of '"
                   + name + "', which changes";
  }

  /// Tells whether code only passes a parameter to modules to which it belongs,
  /// or is that of the module to which it alone belongs.
  bool is_only_passed(const walked_tensor& t, const outside_access& x) const {
    if (x.path.empty() && t.modules.size() == 1)
      return true;
    return !x.passed_to.empty()
           && std::ranges::all_of(x.passed_to, [&](auto* type) {
                return std::ranges::any_of(t.modules, [&](auto i) {
                  return result_.modules[i].script->type().get() == type;
                });
              });
  }

  walked_model result_;
};

} // namespace

walked_model walk(const script_object& root) {
  return script_walker{}.run(root);
}

std::vector<c10::ClassTypePtr> classes_of(const walked_model& x) {
  std::vector<c10::ClassTypePtr> result;
  std::unordered_set<const void*> seen;
  for (auto& m : x.modules)
    if (m.script)
      if (auto type = m.script->type(); seen.insert(type.get()).second)
        result.push_back(type);
  return result;
}

bool is_training(const iv::Object& x) {
  auto slot = x.type()->findAttributeSlot("training");
  return !slot || !x.slots()[*slot].isBool() || x.slots()[*slot].toBool();
}

void set_training(iv::Object& x, bool on) {
  if (auto slot = x.type()->findAttributeSlot("training");
      slot && x.slots()[*slot].isBool())
    x.setSlot(*slot, on);
  for_each_child(x, [on](iv::Object& child, const std::string&) {
    set_training(child, on);
  });
}

} // namespace smp
