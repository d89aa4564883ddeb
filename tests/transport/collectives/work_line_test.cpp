#include "tests/support/catch.hpp"

#include "transport/collectives/work_line.hpp"

#include <future>
#include <thread>
#include <vector>

using namespace smp;

TEST_CASE("small tasks run at once, large ones on a thread of the line",
          "[transport][work_line]") {
  work_line uut;
  auto here = std::this_thread::get_id();
  std::thread::id ran;
  uut.add([&] { ran = std::this_thread::get_id(); }, false);
  CHECK(ran == here);
  CHECK_FALSE(uut.busy());
  std::promise<std::thread::id> large;
  uut.add([&] { large.set_value(std::this_thread::get_id()); }, true);
  CHECK(large.get_future().get() != here);
}

TEST_CASE("tasks keep their order, whoever runs them",
          "[transport][work_line]") {
  std::vector<int> ran;
  std::promise<void> go;
  {
    work_line uut;
    // While this one runs, all others stand behind it.
    uut.add([&] { go.get_future().wait(); }, true);
    for (int i = 0; i < 1000; ++i)
      uut.add([&ran, i] { ran.push_back(i); }, i % 7 == 0);
    CHECK(uut.busy());
    CHECK(ran.empty());
    go.set_value();
  }
  REQUIRE(ran.size() == 1000);
  for (int i = 0; i < 1000; ++i)
    REQUIRE(ran[static_cast<size_t>(i)] == i);
}

TEST_CASE("a task may add tasks, which run after it",
          "[transport][work_line]") {
  work_line uut;
  std::vector<int> ran;
  uut.add(
    [&] {
      uut.add([&] { ran.push_back(2); }, false);
      ran.push_back(1);
    },
    false);
  CHECK(ran == std::vector<int>{1, 2});
}

TEST_CASE("tasks of many threads never run at the same time",
          "[transport][work_line]") {
  int count = 0; // not atomic
  {
    work_line uut;
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; ++i)
      threads.emplace_back([&uut, &count, i] {
        for (int j = 0; j < 2000; ++j)
          uut.add([&count] { ++count; }, (i + j) % 5 == 0);
      });
    for (auto& x : threads)
      x.join();
  }
  CHECK(count == 8000);
}

TEST_CASE("what is added after the end is dropped", "[transport][work_line]") {
  work_line uut;
  uut.close();
  bool ran = false;
  uut.add([&] { ran = true; }, false);
  CHECK_FALSE(ran);
  CHECK_FALSE(uut.busy());
}
