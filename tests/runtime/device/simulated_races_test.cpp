#include "tests/support/catch.hpp"

#include "tests/simulated/driver/memory.hpp"
#include "tests/simulated/driver/races.hpp"
#include "tests/support/runs/program.hpp"
#include "tests/support/torch/simulated.hpp"

#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <torch/torch.h>

#include <future>
#include <memory>
#include <thread>
#include <vector>

using namespace smp;
using namespace smp::test;

using Catch::Matchers::ContainsSubstring;

namespace {

using torch::Tensor;

const auto device = sim_device(0);

const c10::impl::VirtualGuardImpl guard{c10::kPrivateUse1};

struct lanes {
  c10::Stream first = new_sim_stream(), second = new_sim_stream();
};

/// What `from` has been given so far happens before what `to` is given next.
void follow(c10::Stream to, c10::Stream from) {
  c10::Event here{c10::kPrivateUse1};
  here.record(from);
  here.block(to);
}

// Each forgets something unless it is to be correct.
// @returns whether the result is right

/// One stream computes, another reads.
bool reads_another_stream(lanes& s, bool correct) {
  Tensor x;
  {
    c10::StreamGuard on{s.first};
    x = torch::ones({64, 64}, device);
    x = x.mm(x).mm(x);
  }
  c10::StreamGuard on{s.second};
  if (correct) {
    follow(s.second, s.first);
    x.record_stream(s.second);
  }
  return (x + 1).sum().item<double>() == 64.0 * 64 * 4097;
}

/// The reader waits for the event, but the memory goes back too early.
bool frees_while_read(lanes& s, bool correct) {
  Tensor y;
  {
    c10::StreamGuard on{s.first};
    auto x = torch::ones({64, 64}, device);
    follow(s.second, s.first);
    c10::StreamGuard on_second{s.second};
    y = torch::zeros({64, 64}, device);
    y.add_(x);
    if (correct)
      x.record_stream(s.second);
  }
  {
    c10::StreamGuard on{s.first};
    torch::full({64, 64}, 5, device);
  }
  c10::StreamGuard on{s.second};
  return y.sum().item<double>() == 64.0 * 64;
}

/// Two streams use one buffer in turn, and the second does not know that the
/// first one still reads.
bool overwrites_while_read(lanes& s, bool correct) {
  std::unique_ptr<void, void (*)(void*)> arena{sim::raw_allocate(0, 4000),
                                               &sim::raw_free};
  auto buffer = torch::from_blob(arena.get(), {1000}, torch::device(device));
  Tensor y;
  {
    c10::StreamGuard on{s.first};
    buffer.fill_(1);
    y = buffer * 2;
  }
  {
    c10::StreamGuard on{s.second};
    if (correct)
      follow(s.second, s.first);
    buffer.fill_(7);
  }
  c10::StreamGuard on{s.first};
  return y.sum().item<double>() == 2000;
}

struct mistake {
  bool (*run)(lanes&, bool correct);
  const char* report;
};

} // namespace

TEST_CASE(
  "each forgotten order of two streams is reported, whatever the timing",
  "[device]") {
  auto mistakes = std::vector<mistake>{
    {reads_another_stream, "read by aten::add on stream #"},
    {frees_while_read, "write by free on stream #"},
    {overwrites_while_read, "write by aten::fill_ on stream #"},
  };
  auto options = sim::config();
  options.check = true;
  sim::changed_options changed{options};
  lanes s;
  for (auto& [run, report] : mistakes)
    for (auto i = 0; i < 20; ++i) {
      sim::forget_races();
      run(s, false);
      CHECK(sim::races_found() > 0);
      CHECK_THAT(sim::last_race(), ContainsSubstring(report));
      CHECK_THAT(sim::last_race(), ContainsSubstring("is not ordered after"));
      guard.synchronizeDevice(0);
    }
  sim::forget_races();
}

TEST_CASE("what is ordered is right and not reported", "[device]") {
  sim::changed_options changed{strict_devices(100)};
  sim::forget_races();
  lanes s;
  for (auto* run :
       {reads_another_stream, frees_while_read, overwrites_while_read})
    for (auto i = 0; i < 50; ++i)
      CHECK(run(s, true));
  INFO(sim::last_race());
  CHECK(sim::races_found() == 0);
}

TEST_CASE("what the host does too early with pinned memory gives wrong numbers",
          "[device]") {
  sim::changed_options changed{strict_devices()};
  auto pinned = torch::full({64}, 3.0).pin_memory();
  auto x = torch::empty({64}, device);
  guard.synchronizeDevice(0);
  held_stream held{guard.getStream(device)};
  x.copy_(pinned, true);
  pinned.fill_(4); // before it was read
  auto back = torch::zeros({64}, torch::TensorOptions{}.pinned_memory(true));
  back.copy_(x, true);
  CHECK(back.isnan().all().item<bool>()); // before it was written
  held.release();
  guard.synchronizeDevice(0);
  CHECK(back.sum().item<double>() == 4 * 64);
}

TEST_CASE("who is told that a stream has come somewhere is ordered after it",
          "[device]") {
  sim::changed_options changed{strict_devices()};
  sim::forget_races();
  lanes s;
  auto send = [&](bool told) {
    std::promise<void> arrived;
    {
      c10::StreamGuard on{s.first};
      auto x = torch::ones({100}, device);
      x.add_(1);
      auto id = s.first.id();
      if (told)
        sim::notify(0, id, [&] { arrived.set_value(); });
      else // something that the checker does not know
        sim::launch(0, id, "signal", [&] { arrived.set_value(); });
      arrived.get_future().wait();
      c10::StreamGuard on_second{s.second};
      CHECK((x * 2).sum().item<double>() == 400);
      guard.synchronizeDevice(0);
    }
  };
  send(true);
  CHECK(sim::races_found() == 0);
  send(false);
  CHECK(sim::races_found() > 0);
  sim::forget_races();
}

TEST_CASE("what the allocator has seen is no order of the program",
          "[device]") {
  sim::changed_options changed{strict_devices(0)};
  sim::forget_races();
  lanes s;
  c10::StreamGuard on{s.first};
  auto x = torch::ones({3000}, device);
  const auto* place = x.data_ptr();
  Tensor y;
  follow(s.second, s.first);
  {
    c10::StreamGuard on_second{s.second};
    y = x * 2;
  }
  x.record_stream(s.second);
  x.reset();
  std::promise<void> arrived;
  sim::launch(0, s.second.id(), "signal", [&] { arrived.set_value(); });
  arrived.get_future().wait();
  x = torch::ones({3000}, device);
  CHECK(x.data_ptr() == place); // so it has seen that the other is done
  CHECK(sim::races_found() == 0);
  y.add_(1);
  CHECK(sim::races_found() > 0);
  guard.synchronizeDevice(0);
  sim::forget_races();
}

// -- a process that the environment tells to check
// -----------------------------

TEST_CASE("a process with an unordered access", "[.][device]") {
  lanes s;
  reads_another_stream(s, false);
}

TEST_CASE("a process that is told to check fails for an unordered access",
          "[device]") {
  auto command = this_program("a process with an unordered access");
  program checked{command, ".", {{"SMP_SIM_CHECK", "1"}}};
  CHECK_THAT(checked.finish(sim::exit_code_of_races),
             ContainsSubstring("simulated device: 1 unordered accesses, the "
                               "last: read by aten::add on stream #"));
  program unchecked{command};
  unchecked.finish(0);
}
