#include "tests/support/catch.hpp"

#include "tests/support/actors/payloads.hpp"
#include "tests/support/actors/simulated_device.hpp"
#include "tests/support/error_of.hpp"
#include "transport/device_ops.hpp"

#include <chrono>
#include <future>
#include <memory>

using namespace smp;
using namespace smp::test;
using Catch::Matchers::ContainsSubstring;

namespace {

constexpr device_ref elsewhere{1, 0};

} // namespace

TEST_CASE("a rank without devices has host memory, and copies there at once",
          "[transport][device]") {
  host_ops ops;
  CHECK(ops.share(1 << 20).bytes == nullptr);
  CHECK_FALSE(ops.rdma());
  CHECK(ops.here({}) == device_ref{});
  CHECK_FALSE(ops.here(elsewhere).has_value());
  auto from = make_tensor(1000, 1);
  auto block = ops.allocate({}, 1000);
  auto to = ops.copy(from, block, {});
  CHECK(to.data == block.get());
  CHECK(to.owner == block);
  CHECK(to.ready == nullptr);
  CHECK(to.shape == from.shape);
  CHECK(same_bytes(to, pattern(1000, 1)));
  CHECK(ops.copy(make_tensor(0, 1), ops.allocate({}, 0), {}).nbytes == 0);
}

TEST_CASE("a rank without devices refuses what is of one",
          "[transport][device]") {
  host_ops ops;
  CHECK_THAT(
    error_of([&] { ops.allocate(elsewhere, 1); }, error_code::unsupported),
    ContainsSubstring("no device of type 1"));
  auto block = ops.allocate({}, 8);
  auto x = make_tensor(8, 1);
  CHECK_THAT(
    error_of([&] { ops.copy(x, block, elsewhere); }, error_code::unsupported),
    ContainsSubstring("no device of type 1"));
  x.device = elsewhere;
  CHECK_THAT(error_of([&] { ops.copy(x, block, {}); }, error_code::unsupported),
             ContainsSubstring("no device of type 1"));
}

TEST_CASE("a device copies when the source is there, and tells when it has",
          "[transport][device]") {
  simulated_device device{0};
  auto at = device.here({simulated_device::type, 7});
  REQUIRE(at == device_ref{simulated_device::type, 0});
  auto from = device.place(make_tensor(1000, 1));
  auto ready = device.make_event();
  from.ready = ready;
  auto to = device.copy(from, device.allocate({}, 1000), {});
  std::promise<void> done;
  to.ready->then([&done] { done.set_value(); });
  auto told = done.get_future();
  CHECK(told.wait_for(std::chrono::seconds{0}) == std::future_status::timeout);
  device.write(from, pattern(1000, 1));
  ready->happen();
  REQUIRE(told.wait_for(std::chrono::seconds{30}) == std::future_status::ready);
  CHECK(same_bytes(to, pattern(1000, 1)));
  auto back = device.copy(to, device.allocate(*at, 1000), *at);
  CHECK(back.device == *at);
  CHECK(device.read(back) == pattern(1000, 1));
}
