// ctest: label=multiprocess
#include "tests/support/catch.hpp"

#include "tests/simulated/driver/events.hpp"
#include "tests/simulated/driver/memory.hpp"
#include "tests/support/runs/child_process.hpp"
#include "tests/support/torch/simulated.hpp"

#include <c10/core/StreamGuard.h>
#include <torch/torch.h>

#include <csignal>
#include <cstring>
#include <string>

using namespace smp;
using namespace smp::test;

namespace {

constexpr size_t arena_size = 4 << 20;
constexpr int64_t numbers = 1 << 14;

/// What a process tells another that shall use its arena.
struct introduction {
  sim::memory_handle arena;
  sim::event_handle written, read;
};

template <class T>
std::string bytes_of(const T& x) {
  return {reinterpret_cast<const char*>(&x), sizeof x};
}

template <class T>
T from_bytes(const std::string& bytes) {
  T result;
  REQUIRE(bytes.size() == sizeof result);
  std::memcpy(&result, bytes.data(), sizeof result);
  return result;
}

torch::Tensor numbers_in(void* arena, c10::Device device) {
  return torch::from_blob(arena, {numbers}, torch::device(device));
}

/// An arena that another process has opened, too.
struct shared_arena {
  shared_arena() {
    introduction x{sim::export_memory(arena), sim::export_event(written),
                   sim::export_event(read)};
    reader.tell(bytes_of(x));
  }

  ~shared_arena() {
    sim::raw_free(arena);
  }

  void write(double x) {
    sim::wait(read, 0, stream.id());
    c10::StreamGuard on{stream};
    numbers_in(arena, sim_device(0)).fill_(x);
    sim::record(written, 0, stream.id());
  }

  /// @returns what the other process tells, a number
  double heard() {
    auto told = reader.hear();
    REQUIRE(told);
    return std::stod(*told);
  }

  void* arena = sim::raw_allocate(0, arena_size);
  sim::event written = sim::make_shared_event();
  sim::event read = sim::make_shared_event();
  c10::Stream stream = new_sim_stream(0);
  child_process reader{"a process that reads another's arena",
                       {{"SMP_SIM_DELAY_US", "200"}}};
};

} // namespace

TEST_CASE("a process that reads another's arena", "[.][device]") {
  if (!parent_process::exists())
    SKIP("only as a child of another test");
  parent_process writer;
  auto told = from_bytes<introduction>(writer.hear());
  auto* arena = sim::import_memory(1, told.arena);
  auto written = sim::import_event(told.written);
  auto read = sim::import_event(told.read);
  auto stream = new_sim_stream(1);
  c10::StreamGuard on{stream};
  auto x = numbers_in(arena, sim_device(1));
  for (auto order = writer.hear(); order != "end"; order = writer.hear()) {
    if (order == "read in order")
      sim::wait(written, 1, stream.id());
    auto copy = x.clone();
    sim::record(read, 1, stream.id());
    writer.tell("asked");
    writer.tell(std::to_string(copy.mean().item<double>()));
  }
  sim::close_memory(arena);
}

TEST_CASE("processes hand over numbers in device memory, in order of events",
          "[device]") {
  sim::changed_options changed{strict_devices(200)};
  shared_arena x;
  for (auto i = 1; i <= 100; ++i) {
    x.write(i);
    x.reader.tell("read in order");
    REQUIRE(x.reader.hear() == "asked"); // the writer goes on from here
    CHECK(x.heard() == i);
  }
  x.reader.tell("end");
  CHECK(x.reader.join() == 0);
}

TEST_CASE("without the event a process reads what was there before",
          "[device]") {
  shared_arena x;
  x.write(1);
  sim::wait_stream(0, x.stream.id());
  held_stream held{x.stream};
  x.write(2);
  x.reader.tell("read at once");
  REQUIRE(x.reader.hear() == "asked");
  CHECK(x.heard() == 1);
  x.reader.tell("read in order");
  REQUIRE(x.reader.hear() == "asked");
  held.release();
  CHECK(x.heard() == 2);
  x.reader.tell("end");
  CHECK(x.reader.join() == 0);
}

TEST_CASE("an arena outlives a process that has opened it", "[device]") {
  shared_arena x;
  x.write(1);
  x.reader.tell("read in order");
  REQUIRE(x.reader.hear() == "asked");
  CHECK(x.heard() == 1);
  x.reader.signal(SIGKILL);
  CHECK(x.reader.join() == -SIGKILL);
  x.write(3);
  c10::StreamGuard on{x.stream};
  CHECK(numbers_in(x.arena, sim_device(0)).mean().item<double>() == 3);
}

TEST_CASE("a process cannot open its own arena", "[device]") {
  auto* arena = sim::raw_allocate(0, arena_size);
  CHECK_THROWS(sim::import_memory(1, sim::export_memory(arena)));
  sim::raw_free(arena);
}
