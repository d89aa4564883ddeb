#include "python/extension/python_schedule.hpp"

#include "smp/schedule_actor.hpp"
#include "transport/error.hpp"

#include <memory>
#include <string>
#include <utility>

namespace smp::python {

namespace {

/// A task that Python code names.
struct named_task {
  task what;
};

std::string text_of(py::handle x) {
  return py::repr(x).cast<std::string>();
}

class python_schedule {
public:
  static inline const char* name = "smp.python-schedule";

  void make(const shared_object& kind) {
    running_python python;
    instance_ = user_code(
      [&] { return std::make_unique<shared_object>(kind.get()()); });
  }

  template <class... Ts>
  schedule_answer ask(const char* event, const Ts&... xs) {
    running_python python;
    return user_code([&]() -> schedule_answer {
      py::object x = instance_->get().attr(event)(xs...);
      if (x.is_none())
        return wait_for_event();
      if (!py::isinstance<named_task>(x))
        throw error{error_code::schedule,
                    std::string{event} + " returned " + text_of(x)
                      + ": return smp.start_forward(microbatch), "
                        "smp.start_backward(microbatch) or None"};
      return {x.cast<const named_task&>().what};
    });
  }

private:
  std::unique_ptr<shared_object> instance_;
};

schedule_actor::behavior_type
behavior(schedule_actor::stateful_pointer<python_schedule> self,
         const shared_object& kind) {
  auto& st = self->state;
  st.make(kind);
  return {
    [&st](const step_begins& x) {
      return st.ask("step_begins", x.step.value, x.microbatches, x.partitions,
                    x.active);
    },
    [&st](const task_started& x) {
      return st.ask("task_started", named_task{x.what});
    },
    [&st](const forward_ended& x) {
      return st.ask("forward_ended", x.microbatch.value);
    },
    [&st](const backward_ready& x) {
      return st.ask("backward_ready", x.microbatch.value);
    },
    [&st](const backward_ended& x) {
      return st.ask("backward_ended", x.microbatch.value);
    },
    [&st](const memory_level& x) {
      return st.ask("memory_level", x.pp_rank, x.bytes);
    },
    [&st](const rank_activity& x) {
      return st.ask("rank_activity", x.pp_rank, x.busy);
    },
  };
}

} // namespace

std::shared_ptr<const schedule_actor_type> schedule_type_of(py::object x) {
  auto name = x.attr("__name__").cast<std::string>();
  auto kind = std::make_shared<shared_object>(std::move(x));
  return make_schedule_actor_type<
    schedule_actor::stateful_pointer<python_schedule>>(
    std::move(name),
    [kind](auto self, const schedule_setup&) { return behavior(self, *kind); });
}

void bind_schedule(py::module_& m) {
  py::class_<named_task>(m, "Task")
    .def_property_readonly(
      "microbatch", [](const named_task& x) { return x.what.microbatch.value; })
    .def_property_readonly("phase", [](const named_task& x) {
      return x.what.what == phase::forward ? "forward" : "backward";
    });
  m.def("start_forward", [](uint64_t microbatch) {
    return named_task{*start_forward(microbatch_id{microbatch}).next};
  });
  m.def("start_backward", [](uint64_t microbatch) {
    return named_task{*start_backward(microbatch_id{microbatch}).next};
  });
}

} // namespace smp::python
