// torch.nn.Sequential: consecutive children on one rank are one request (R8).
// Only its own forward hands a value from child to child such that no other
// code sees it; loops of the program over its children call each.

#include "python/extension/python_module.hpp"

#include "python/extension/values.hpp"
#include "runtime/calls/caller.hpp"
#include "runtime/execution/running_call.hpp"
#include "runtime/intercept/trace/tracer.hpp"
#include "transport/error.hpp"

#include <torch/csrc/utils/pybind.h>

#include <utility>

namespace smp::python {

namespace {

/// Tells whether a class has these methods from another one.
bool has_from(py::handle type, py::handle other,
              std::initializer_list<const char*> names) {
  for (auto* name : names)
    if (!type.attr(name).is(other.attr(name)))
      return false;
  return true;
}

py::object of_torch(const char* name) {
  return py::module_::import("torch.nn").attr(name);
}

std::vector<std::shared_ptr<called_module>> children_of(const py::object& x) {
  std::vector<std::shared_ptr<called_module>> result;
  for (auto [name, child] : py::dict(x.attr("_modules")))
    if (!child.is_none())
      result.push_back(called_module_of(child));
  return result;
}

/// Its class does nothing around the call that smp sees.
bool is_called_plainly(const called_module& x) {
  return has_from(py::type::handle_of(x.self()), of_torch("Module"),
                  {"__call__", "_call_impl"});
}

// What a row of children takes and returns, as the engine knows it: preceded by
// its type, of which 0 is a tensor.

value put_carried(packer& to, py::handle x) {
  int64_t type = THPVariable_Check(x.ptr()) ? 0 : 1;
  return value::tuple({value::of(type), put(to, x)});
}

py::object get_carried(unpacker& from, const value& x) {
  auto* parts = x.get_if<tuple_value>();
  if (parts == nullptr || parts->items.size() != 2)
    throw error{error_code::protocol, "no typed value in a Sequential"};
  return get(from, parts->items[1]);
}

} // namespace

bool python_module::is_sequential() const {
  py::gil_scoped_acquire lock;
  auto sequential = of_torch("Sequential");
  return py::isinstance(self(), sequential)
         && has_from(py::type::handle_of(self()), sequential,
                     {"__call__", "_call_impl", "__iter__", "forward"})
         && !is_compiled() && differs_from_class().empty();
}

/// By child, the first one behind it that is not in one request with it. Empty
/// if each is called by itself.
const std::vector<uint32_t>& python_module::rows() {
  if (rows_)
    return *rows_;
  rows_.emplace();
  if (!is_sequential())
    return *rows_;
  auto children = children_of(self());
  auto n = static_cast<uint32_t>(children.size());
  std::vector<uint32_t> ends(n);
  auto any = false;
  for (uint32_t i = n; i-- > 0;) {
    auto& x = children[i]->smp_hook;
    auto continues = [&] {
      auto& y = children[i + 1]->smp_hook;
      return !x.local && !y.local && x.owner == y.owner && x.region == y.region
             && is_called_plainly(*children[i])
             && is_called_plainly(*children[i + 1]);
    };
    ends[i] = i + 1;
    if (i + 1 < n && continues()) {
      ends[i] = ends[i + 1];
      any = true;
    }
  }
  if (any)
    rows_ = std::move(ends);
  return *rows_;
}

bool python_module::has_rows(const py::tuple& args, const py::dict& kwargs) {
  return args.size() == 1 && py::len(kwargs) == 0
         && running_call::current() != nullptr && !tracer::current()
         && !rows().empty() && is_sequential();
}

py::object python_module::run_rows(py::object x) {
  auto children = children_of(self());
  auto& ends = rows();
  auto training = is_training();
  for (uint32_t i = 0, last = 0; i < children.size(); i = last) {
    last = i;
    while (THPVariable_Check(x.ptr()) && last < ends.at(i)
           && children[last]->is_training() == training)
      ++last;
    if (last > i + 1) {
      for (auto j = i; j < last; ++j)
        children[j]->refuse_set_attributes();
      x = call_row(*children[i], i, last, x);
      continue;
    }
    last = i + 1;
    x = children[i]->self()(x);
  }
  return x;
}

/// @param first child `begin`, of [begin, end)
py::object python_module::call_row(const called_module& first, uint32_t begin,
                                   uint32_t end, py::handle x) {
  packer in;
  std::vector<value> args{put_carried(in, x)};
  call_target target;
  target.kind = request_kind::range;
  target.first = begin;
  target.last = end;
  target.training = is_training();
  target.tensors_only = true; // what it returned the last time decides
  auto result = [&] {
    py::gil_scoped_release meanwhile;
    return called_module::await_in_function(call_remote(
      first.smp_hook.owner, position(), target, in, std::move(args)));
  }();
  return get_carried(result.tensors, result.result);
}

invocation python_module::run_range(uint32_t first, uint32_t last, bool served,
                                    unpacker& in,
                                    const std::vector<value>& args,
                                    packer& out) {
  running_python python;
  auto children = children_of(self());
  if (!is_sequential() || first >= last || last > children.size()
      || args.size() != 1)
    throw error{error_code::protocol, "no such range of a Sequential"};
  auto x = get_carried(in, args[0]);
  for (auto i = first; i < last; ++i)
    x = user_code(
      [&] { return children[i]->run_in_row(std::move(x), served); });
  value_path::scope place{out, "result"};
  return {put_carried(out, x), {}};
}

py::object called_module::run_in_row(py::object x, bool served) {
  intercepted_call what{smp_hook.id, smp_hook.ordered, served, smp_hook.stream};
  // This shows who waits for peers: all of the row is one request.
  what.part = smp_hook.distributed != nullptr;
  call_scope noted{what};
  auto args = py::make_tuple(std::move(x));
  return smp_hook.distributed ? run_shared_part(noted, args, {})
                              : run(noted, args, {});
}

} // namespace smp::python
