#include "python/extension/interpreter.hpp"
#include "python/extension/model.hpp"
#include "runtime/base/random_stream.hpp"

#include <utility>

namespace smp::python {

namespace {

/// The functions of smp._generators.
class python_generators final : public language_generators {
public:
  state now() override {
    py::gil_scoped_acquire lock;
    return std::make_shared<const shared_object>(module().attr("state")());
  }

  void put_back(const state& x) override {
    py::gil_scoped_acquire lock;
    module().attr("put_back")(object_of(x));
  }

  void seed(uint64_t x) override {
    py::gil_scoped_acquire lock;
    module().attr("seed")(x);
  }

  void end_trace(const state& found) override {
    py::gil_scoped_acquire lock;
    auto now = module().attr("state")();
    if (module().attr("is_same")(object_of(found), now).cast<bool>())
      return;
    drawn_ = true;
    module().attr("put_back")(object_of(found));
  }

  /// Whether traces have drawn since the last call.
  bool take_drawn() {
    return std::exchange(drawn_, false);
  }

private:
  static py::module_ module() {
    return py::module_::import("smp._generators");
  }

  static const py::object& object_of(const state& x) {
    return static_cast<const shared_object*>(x.get())->get();
  }

  bool drawn_ = false;
};

} // namespace

void bind_generators(py::module_& m) {
  static auto& generators = *new python_generators; // traces may outlive it
  watch_generators(&generators);
  m.def("take_drawn", [] { return generators.take_drawn(); });
  m.def("include_generators",
        [](bool on) { random_stream::include(on ? &generators : nullptr); });
}

} // namespace smp::python
