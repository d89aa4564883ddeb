#include "tests/support/catch.hpp"

#include "tests/support/error_of.hpp"
#include "tests/support/scratch_dir.hpp"
#include "tests/support/torch/two_ranks.hpp"

#include <filesystem>
#include <functional>
#include <string>
#include <vector>

// A schedule of a plug-in that is wrong as long as there is a file of its name.

using namespace smp;
using namespace smp::test;

namespace {

struct refused_schedule : scratch_dir {
  refused_schedule() {
    refuse();
    auto& x = world.config;
    x.pipeline = "actor";
    x.schedule.plugin = built_program("../lib/faulty_schedule.so");
    x.schedule.name = "faulty";
    x.schedule.options = path / "refuses";
  }

  void refuse() const {
    write("refuses", "");
  }

  void accept() const {
    std::filesystem::remove(path / "refuses");
  }

  /// Runs `f` on one rank while all wait.
  static void alone(const session& s, const std::function<void()>& f) {
    barrier();
    if (s.rank() == 0)
      f();
    barrier();
  }

  virtual_world_options world = manual_world(2, 2);
};

auto make_model() {
  auto product = [](auto& self, Tensor x) { return x * self.weight; };
  auto call = [](auto& self, Tensor x) { return self.there(x * self.here); };
  return seeded([&] { return caller{product, call}; });
}

/// Fails the rank, and so the test: Catch2's macros are for its own thread.
void require(bool x, const std::string& what) {
  if (!x)
    throw std::runtime_error{"not true: " + what};
}

void require_refused(const std::function<void()>& f) {
  auto told = error_of(f, error_code::config);
  require(told.find("schedule actor \"faulty\"") != std::string::npos, told);
}

} // namespace

TEST_CASE_METHOD(refused_schedule,
                 "a schedule is refused each time, and what waits for the "
                 "partition runs once it fits",
                 "[runtime][schedule]") {
  run_virtual_world(2, world, [&](session& s) {
    distributed_model model{make_model()};
    int called = 0;
    model.register_post_partition_hook([&called] { ++called; });
    auto evaluate = step([&](Tensor x) { return model(x).sum(); });
    auto sum = [&] {
      return evaluate(torch::ones({4, 3})).reduce_sum().item<double>();
    };
    for (auto& attempt : std::vector<std::function<void()>>{
           [&] { model.partition(); }, [&] { model.partition(); },
           [&] { sum(); }, [&] { sum(); }}) {
      require_refused(attempt);
      require(called == 0, "it is too early for hooks");
    }
    alone(s, [&] { accept(); });
    require(sum() == 24, "the sum of 12 times 2");
    require(called == 1, "the hook ran");
    require(sum() == 24, "again");
    require(called == 1, "the hook ran once");
  });
}

TEST_CASE_METHOD(refused_schedule,
                 "a schedule that fits so many microbatches may be refused for "
                 "others",
                 "[runtime][schedule]") {
  accept();
  run_virtual_world(2, world, [&](session& s) {
    distributed_model model{make_model()};
    auto body = [&](Tensor x) { return model(x).sum(); };
    auto two = step(body);
    auto four = step(body, {.microbatches = 4});
    auto x = torch::ones({4, 3});
    require(two(x).reduce_sum().item<double>() == 24, "two");
    alone(s, [&] { refuse(); });
    for (int i = 0; i < 2; ++i)
      require_refused([&] { four(x); });
    model.partition(); // plays nothing: that it fits two is known
    alone(s, [&] { accept(); });
    require(four(x).reduce_sum().item<double>() == 24, "four");
  });
}
