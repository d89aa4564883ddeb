#include "runtime/session/session.hpp"
#include "python/extension/model.hpp"
#include "python/extension/python_schedule.hpp"
#include "python/extension/values.hpp"
#include "runtime/config/config_file.hpp"
#include "runtime/launch/environment.hpp"
#include "runtime/launch/error_exit.hpp"
#include "runtime/launch/launcher.hpp"
#include "runtime/launch/run_dir.hpp"
#include "runtime/launch/shared_segments.hpp"
#include "runtime/session/groups.hpp"
#include "runtime/values/tensor_bytes.hpp"
#include "runtime/values/value_codec.hpp"
#include "transport/stacks/script_probe.hpp"

#include <fmt/format.h>
#include <torch/csrc/utils/pybind.h>

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace smp::python {

/// An object that programs send each other, by content.
struct sent_object {
  value root;
  std::vector<at::Tensor> tensors;
};

template <class Inspector>
bool inspect(Inspector& f, sent_object& x) {
  return f.object(x).fields(f.field("root", x.root),
                            f.field("tensors", x.tensors));
}

namespace {

using without_lock = py::call_guard<py::gil_scoped_release>;

/// Never destroyed by the end of the process: Python ends it.
std::unique_ptr<session>& the_session = *new std::unique_ptr<session>;

session& current() {
  if (!the_session)
    throw error{error_code::config,
                "there is no session: call smp.init() first"};
  if (session::current_or_null() != the_session.get())
    throw error{error_code::config,
                "smp.verify runs the step in one process, which is no rank: "
                "read what smp says of ranks outside of the step and of "
                "modules"};
  return *the_session;
}

/// @returns what the program has to do for it: modules by name, and their
/// pp_ranks
std::map<std::string, uint64_t>
begin(const std::string& text, const std::string& name,
      const std::vector<std::string>& settings,
      const std::map<std::string, bool>& of_programs,
      const std::optional<py::object>& schedule) {
  if (the_session)
    throw error{error_code::config,
                "smp.init() was called before; smp.shutdown() ends a session"};
  auto here = read_rank_environment();
  auto config = program_config(text, name, settings, "smp.init",
                               here ? here->world_size : 1);
  auto parts = config.smp.pipeline_parallel_degree
               * config.smp.tensor_parallel_degree;
  if (!here && parts > 1)
    throw config_error(
      fmt::format("the model is divided among {} ranks, but this process is "
                  "alone: start the program with python -m smp.run -n {}, or "
                  "with torchrun --nproc-per-node {}",
                  parts, parts, parts));
  config.smp.print_partition = true;
  if (schedule) {
    py::gil_scoped_acquire lock;
    config.smp.pipeline = "actor";
    config.smp.schedule_actor = schedule_type_of(*schedule);
  }
  if (auto i = of_programs.find("average_grads_across_microbatches");
      i != of_programs.end())
    config.smp.average_grads_across_microbatches = i->second;
  the_session = std::make_unique<session>(config.smp);
  return config.manual_partition;
}

/// Ends the session, after all ranks have come here.
void end() {
  the_session.reset();
}

py::dict stats_of(const step_stats& x) {
  py::dict result;
  result["seconds"] = x.seconds;
  result["executing_seconds"] = x.executing_seconds;
  result["requests"] = x.requests;
  result["bytes_sent"] = x.bytes_sent;
  result["waits"] = x.waits;
  result["replayed"] = x.replayed;
  result["fell_back"] = x.fell_back;
  result["ran_again"] = x.ran_again;
  return result;
}

int start_ranks(uint64_t ranks, std::vector<std::string> command,
                const std::string& run_dir, const std::string& name) {
  launch_options x;
  x.ranks = ranks;
  x.command = std::move(command);
  if (!run_dir.empty())
    claim_run_dir(run_dir, {"log-0.txt", "end.json"});
  if (!run_dir.empty() || ranks > 1)
    x.log_dir = make_run_dir(run_dir, run_dir.empty() ? name : std::string{});
  // Ranks import LibTorch before they join, on a busy machine for long.
  x.join_limit = std::chrono::minutes{5};
  py::gil_scoped_release meanwhile;
  return launch(x);
}

/// Ends this rank because of an exception that Python has printed.
[[noreturn]] void end_after_exception(const std::string& code) {
  auto kind = error_code_called(code);
  leave_word(kind == error_code::rank_down ? last_word::heard
                                           : last_word::told);
  remove_segments_of_lost_ranks();
  exit_at_once(exit_code_of(kind));
}

comm_group group_of(const py::object& x) {
  if (!py::isinstance<py::str>(x))
    return comm_group{x.cast<std::vector<uint64_t>>()};
  auto name = x.cast<std::string>();
  for (auto kind : {group_kind::world, group_kind::pp, group_kind::tp,
                    group_kind::rdp, group_kind::dp, group_kind::mp})
    if (name == to_string(kind))
      return kind;
  throw error{error_code::config, "no group is called '" + name + "'"};
}

sent_object sent(const py::object& x) {
  packer tensors;
  auto root = put(tensors, x);
  return {std::move(root), tensors.tensors()};
}

py::object received(sent_object x) {
  unpacker tensors{std::move(x.tensors)};
  return get(tensors, x.root);
}

/// Calls `f` without the lock.
template <class F>
auto waiting(F f) {
  py::gil_scoped_release meanwhile;
  return f();
}

bool can_be_sent(const py::object& x) {
  try {
    sent(x);
    return true;
  } catch (const error&) {
    return false;
  }
}

void bind_exchange(py::module_& m) {
  m.def("can_be_sent", &can_be_sent);
  m.def("send", [](const py::object& x, uint64_t to, const py::object& group) {
    auto among = group_of(group);
    auto content = sent(x);
    waiting([&] { smp::send(content, to, among); });
  });
  m.def("recv_from", [](uint64_t from, const py::object& group) {
    auto among = group_of(group);
    return received(
      waiting([&] { return smp::recv_from<sent_object>(from, among); }));
  });
  m.def("broadcast",
        [](const py::object& x, const py::object& group, uint64_t root) {
          auto among = group_of(group);
          auto content = sent(x);
          return received(
            waiting([&] { return smp::broadcast(content, among, root); }));
        });
  m.def("allgather", [](const py::object& x, const py::object& group) {
    auto among = group_of(group);
    auto content = sent(x);
    py::list result;
    for (auto& y : waiting([&] { return smp::allgather(content, among); }))
      result.append(received(std::move(y)));
    return result;
  });
}

void bind_groups(py::module_& m) {
  for (auto& [name, f] :
       std::initializer_list<std::pair<const char*, uint64_t (*)()>>{
         {"rank", &rank},
         {"size", &size},
         {"local_rank", &local_rank},
         {"local_size", &local_size},
         {"pp_rank", &pp_rank},
         {"pp_size", &pp_size},
         {"tp_rank", &tp_rank},
         {"tp_size", &tp_size},
         {"rdp_rank", &rdp_rank},
         {"rdp_size", &rdp_size},
         {"dp_rank", &dp_rank},
         {"dp_size", &dp_size},
         {"mp_rank", &mp_rank},
         {"mp_size", &mp_size},
         {"data_rank", &data_rank},
         {"data_size", &data_size}})
    m.def(name, [f = f] {
      current();
      return f();
    });
  m.def("get_group",
        [](const py::object& x) { return get_group(group_of(x)); });
  m.def("barrier", [](const py::object& x) {
    auto group = group_of(x);
    py::gil_scoped_release meanwhile;
    barrier(group);
  });
}

} // namespace

void bind_session(py::module_& m) {
  m.def("begin", &begin, without_lock{});
  m.def("end", &end, without_lock{});
  m.def("running", [] { return the_session != nullptr; });
  m.def("start_ranks", &start_ranks);
  m.def("end_after_exception", &end_after_exception);
  m.def("settle_process", &settle_process);
  m.def("microbatches", [] { return current().config().microbatches; });
  m.def("shards_gradients", [] { return current().config().shard_gradients; });
  m.def("run_dir", [] { return current().run_dir(); });
  m.def("last_step", [] { return stats_of(current().last_step()); });
  m.def("script_probe", []() -> std::optional<std::pair<int, int>> {
    auto x = open_script_probe();
    return x ? std::optional{std::pair{x->signal, x->file}} : std::nullopt;
  });
  m.def("started_by", []() -> std::optional<std::string> {
    auto here = read_rank_environment();
    if (!here)
      return std::nullopt;
    return here->told_by;
  });
  bind_groups(m);
  bind_exchange(m);
}

} // namespace smp::python
