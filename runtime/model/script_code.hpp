#pragma once

// What the methods of TorchScript classes do, read from their graphs.

#include <ATen/core/jit_type.h>
#include <torch/csrc/jit/ir/ir.h>

#include <functional>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace smp {

/// Prefix under which the code of a method is kept, once the method itself asks
/// where its calls have to run (runtime/intercept/script/rewrite.hpp).
inline constexpr std::string_view kept_prefix = "__smp_orig_";

/// An attribute of a class, of all its objects.
using class_attribute = std::pair<const c10::ClassType*, std::string>;

/// Code that reads or sets an attribute of a module other than `self`, or reads
/// a tensor of `self` beside its children.
struct outside_access {
  /// Attributes from `self` to the other module; empty: `self`.
  std::vector<std::string> path;
  class_attribute attribute;
  bool writes = false;
  /// Of a read: the classes of linears and tables to which what was read is
  /// only passed, as their weight or bias. Empty: code does something else with
  /// it. (Traced code passes a parameter that modules share to all but one.)
  std::set<const c10::ClassType*> passed_to = {};
};

/// A call of a child by a Sequential.
struct chain_link {
  std::string child; // attribute of the Sequential
  std::string method;
};

/// Calls of children, one after the other, with nothing between them.
using chain = std::vector<chain_link>;

/// What can be told about the code of some classes before it runs. The answers
/// are the same after classes are rewritten.
class script_code {
public:
  /// Reads all methods and forward hooks of the classes of modules.
  explicit script_code(const std::vector<c10::ClassTypePtr>& classes);

  /// Tells whether some method sets the attribute, or changes the list or
  /// dictionary in it: only then can it differ between ranks.
  bool is_mutable(const class_attribute& x) const {
    return mutable_.contains(x);
  }

  /// Attributes of `self` that methods of the class set or change.
  const std::set<std::string>& sets(const c10::ClassType* x) const;

  const std::vector<outside_access>&
  outside_accesses(const c10::ClassType* x) const;

  /// A class whose code starts tasks (`torch.jit.fork`), which would run
  /// outside of any microbatch; null if there is none.
  const c10::ClassType* forks() const noexcept {
    return forks_;
  }

  /// @returns the links of a method that is a chain, or null.
  const chain* find_chain(const c10::ClassType* x,
                          const std::string& method) const;

private:
  void read(const c10::ClassType* cls, const torch::jit::Graph& graph,
            const torch::jit::Block& block);

  std::set<class_attribute> mutable_;
  std::map<const c10::ClassType*, std::set<std::string>> sets_;
  std::map<const c10::ClassType*, std::vector<outside_access>> outside_;
  std::map<class_attribute, chain> chains_; // by class and method
  const c10::ClassType* forks_ = nullptr;
};

/// Takes the name of a method and its code.
using body_visitor = std::function<void(const std::string&,
                                        torch::jit::Graph&)>;

/// Calls `f` for the code of every method of the class, kept or not.
void for_each_method(const c10::ClassType& x, const body_visitor& f);

/// Calls `f` for the code of every method and forward hook of the
/// class, kept or not.
void for_each_body(const c10::ClassType& x, const body_visitor& f);

/// Tells whether a method of this name is a call of the module: a trace has one
/// for each call, "forward", "forward1", "forward2", ...
bool is_forward(std::string_view method);

/// @returns the code of a method, rewritten or not; null if it has none
const torch::jit::Graph* graph_of(const c10::ClassType& x,
                                  const std::string& method);

/// Tells whether code uses `x` only as the weight or bias of a linear, or as
/// the table of an embedding, there and not in modules that it calls.
bool is_parameter_of_operation(const torch::jit::Value& x);

/// Calls `f(node)` for all nodes of the block and of the blocks in it. `f` may
/// destroy its node.
void for_each_node(torch::jit::Block& x,
                   const std::function<void(torch::jit::Node&)>& f);

/// Tells whether an operation writes into the list or dictionary `x`, as
/// `append` does.
bool is_changed_in_place(const torch::jit::Value& x);

/// The attribute that a GetAttr or SetAttr, rewritten or not, accesses.
struct attribute_access {
  bool writes = false;
  torch::jit::Value* object = nullptr;
  std::string name;
};

/// @returns an access with a null object if `x` accesses no module.
attribute_access access_of(const torch::jit::Node& x);

} // namespace smp
