#pragma once

// A module of Python as smp sees it, and its calls.

#include "python/extension/interpreter.hpp"
#include "runtime/calls/caller.hpp"
#include "runtime/calls/invoker.hpp"
#include "runtime/intercept/call_scope.hpp"
#include "runtime/model/hook.hpp"
#include "runtime/model/module_facts.hpp"

#include <torch/nn/module.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace smp::python {

class called_module;
struct registered_module;

/// Stands for a `torch.nn.Module`, by its identity; has nothing itself.
class python_module : public torch::nn::Module, public foreign_module {
public:
  explicit python_module(const py::object& self);

  // -- torch::nn::Module and module_facts -------------------------------------

  void train(bool on) override;
  bool is_training() const noexcept override;

  // -- foreign_module ---------------------------------------------------------

  contents find() override;
  bool is_container() const override;
  bool is_sequential() const override;
  std::string differs_from_class() const override;
  c10::IValue option(const char* name) const override;
  std::unique_ptr<kept_attributes> keep_attributes() const override;
  invocation run_range(uint32_t first, uint32_t last, bool served, unpacker& in,
                       const std::vector<value>& args, packer& out) override;

  /// Runs the root of a model.
  py::object operator()(const py::args& args, const py::kwargs& kwargs);

  const py::object& self() const noexcept {
    return self_.get();
  }

protected:
  /// Its position in the model.
  virtual module_id position() const {
    return module_id{0};
  }

  /// Tells whether `torch.compile` made its code.
  bool is_compiled() const;

  /// Tells whether a call is one of a Sequential of which several children run
  /// as one request, see `run_rows`.
  bool has_rows(const py::tuple& args, const py::dict& kwargs);

  /// Does what forward of torch's Sequential does.
  py::object run_rows(py::object x);

private:
  const std::vector<uint32_t>& rows();
  py::object call_row(const called_module& first, uint32_t begin, uint32_t end,
                      py::handle x);

  shared_object self_;
  std::optional<std::vector<uint32_t>> rows_;
};

/// One whose calls smp intercepts: all of a model but its root.
class called_module final : public python_module, public hook_base {
public:
  explicit called_module(const py::object& self);

  /// What Python calls instead of the module's own `_call_impl`.
  py::object operator()(const py::args& args, const py::kwargs& kwargs);

  /// Serves a call: the function that is registered as `invoker_function`.
  static invocation serve(torch::nn::Module& object, unpacker& in,
                          const std::vector<value>& args, packer& out);

  /// Runs it as one of several children of a Sequential.
  /// @param served another rank requested them
  py::object run_in_row(py::object x, bool served);

  /// Waits for promises where code cannot go on with them.
  static call_result await_in_function(call_result x);

  /// Of a module of another rank: attributes that hold an Elsewhere here, see
  /// smp/_elsewhere.py.
  std::vector<std::string> elsewhere;

  /// @throws error if code of this rank has set one of these
  void refuse_set_attributes() const;

  /// What stands for a module of a registered class; null as long as nobody
  /// asked for it, and for others.
  std::shared_ptr<const registered_module> registered;

private:
  module_id position() const override {
    return smp_hook.id;
  }

  py::object call_here(const py::tuple& args, const py::dict& kwargs);
  py::object call_there(const py::tuple& args, const py::dict& kwargs);
  py::object run(call_scope& noted, const py::tuple& args,
                 const py::dict& kwargs);
  py::object run_shared_part(call_scope& noted, const py::tuple& args,
                             const py::dict& kwargs);

  /// What a call may change, as it was before.
  struct state {
    std::vector<std::pair<std::string, at::Tensor>> buffers;
    /// Null: of no interest.
    std::unique_ptr<kept_attributes> attributes = {};
  };

  state state_before_call() const;
  void look_at_changes(const state& before) const;
};

using module_ptr = std::shared_ptr<python_module>;

/// @returns what stands for a module: always the same, as long as it lives
std::shared_ptr<called_module> called_module_of(py::handle x);

/// Lets the module's calls go past smp again.
void release_module(py::handle x);

void bind_modules(py::module_& m);

} // namespace smp::python
