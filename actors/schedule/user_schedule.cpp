#include "actors/schedule/user_schedule.hpp"

#include "actors/protocol/actor_system.hpp"
#include "actors/schedule/schedule_actor.hpp"
#include "actors/schedule/schedule_dialog.hpp"
#include "actors/schedule/schedule_errors.hpp"

#include <caf/scoped_actor.hpp>
#include <caf/send.hpp>

#include <optional>
#include <utility>
#include <variant>

#include <dlfcn.h>

namespace smp {

// -- plug-ins -----------------------------------------------------------------

namespace {

error plugin_error(const std::string& path, const std::string& why) {
  return error{error_code::config,
               "smp.schedule.plugin = \"" + path + "\": " + why};
}

template <class F>
F symbol(void* library, const char* name) {
  return reinterpret_cast<F>(::dlsym(library, name));
}

} // namespace

std::shared_ptr<const schedule_actor_type>
load_schedule_actor(const std::string& path, const std::string& name) {
  auto library = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr)
    throw plugin_error(path, ::dlerror());
  auto interface_of = symbol<int (*)()>(library, "smp_schedule_interface");
  auto fill = symbol<void (*)(schedule_registry&)>(library,
                                                   "smp_register_schedules");
  if (interface_of == nullptr || fill == nullptr)
    throw plugin_error(path,
                       "is not a plug-in: it lacks SMP_SCHEDULES(...) {...}");
  if (auto x = interface_of(); x != SMP_SCHEDULE_INTERFACE)
    throw plugin_error(path, "was built for version " + std::to_string(x)
                               + " of the interface, this is version "
                               + std::to_string(SMP_SCHEDULE_INTERFACE)
                               + "; build it again");
  schedule_registry registry;
  fill(registry);
  if (auto i = registry.types().find(name); i != registry.types().end())
    return i->second;
  std::string known;
  for (auto& [key, type] : registry.types())
    known += (known.empty() ? "\"" : ", \"") + key + "\"";
  throw error{error_code::config,
              "smp.schedule.name = \"" + name + "\" is not in " + path
                + (known.empty() ? "; it has none" : "; it has " + known)};
}

// -- rehearsal ----------------------------------------------------------------

namespace {

/// Answers arrive while `next` waits for them, on the caller's thread.
class rehearsal : public schedule, public schedule_asker {
public:
  rehearsal(caf::actor_system& sys, const user_schedule& x,
            uint64_t microbatches)
    : timeout_(x.timeout),
      self_(sys),
      actor_(x.type->spawn(sys, {x.options, x.partitions}, x.own_thread)) {
    self_->monitor(actor_);
    dialog_.emplace(x.type->name(),
                    step_begins{step_id{0}, microbatches, x.partitions,
                                x.active(microbatches)},
                    *this);
  }

  ~rehearsal() override {
    caf::anon_send_exit(actor_, caf::exit_reason::kill);
  }

  void ask(uint64_t number, const schedule_event& x) override {
    open_.emplace(number, x);
  }

  std::optional<task> next() override {
    while (open_) {
      auto [number, event] = *std::exchange(open_, std::nullopt);
      std::visit([this, number = number](auto& x) { put(number, x); }, event);
    }
    return dialog_->next();
  }

  void forward_done(microbatch_id x) override {
    dialog_->forward_done(x);
  }

  void ended(microbatch_id x) override {
    dialog_->ended(x);
  }

  void rank_changed(const rank_level& x) override {
    dialog_->rank_changed(x);
  }

private:
  template <class Event>
  void put(uint64_t number, const Event& x) {
    self_->request(actor_, timeout_, x)
      .receive([&](const schedule_answer& y) { dialog_->answered(number, y); },
               [&](const caf::error& e) {
                 auto [code, why] = explain(cause_of(e), timeout_);
                 dialog_->failed(number, code, why);
               });
  }

  /// If the actor ended, its exit reason says more than the lack of an answer.
  caf::error cause_of(caf::error x) {
    using namespace std::chrono_literals;
    auto ended = has_ended(x);
    self_->receive([&x](const caf::down_msg& y) { x = y.reason; },
                   caf::after(ended ? 1000ms : 0ms) >> [] {});
    return x;
  }

  std::chrono::milliseconds timeout_;
  caf::scoped_actor self_;
  schedule_actor actor_;
  std::optional<std::pair<uint64_t, schedule_event>> open_;
  std::optional<schedule_dialog> dialog_;
};

} // namespace

schedule_ptr rehearse(actor_host& host, const user_schedule& x,
                      uint64_t microbatches) {
  return std::make_unique<rehearsal>(host.get().system, x, microbatches);
}

} // namespace smp
