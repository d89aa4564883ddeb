#include "tests/support/catch.hpp"

#include "tests/simulated/backend/operators.hpp"
#include "tests/simulated/driver/host_waits.hpp"
#include "tests/simulated/driver/memory.hpp"
#include "tests/support/torch/simulated.hpp"

#include <ATen/DeviceAccelerator.h>
#include <ATen/autocast_mode.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <torch/torch.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

using namespace smp;
using namespace smp::test;

using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::MessageMatches;

namespace {

using torch::Tensor;

const auto device = sim_device(0), other_device = sim_device(1);

const c10::impl::VirtualGuardImpl guard{c10::kPrivateUse1};

bool same(const Tensor& a, const Tensor& b) {
  return at::equal(a.cpu(), b.cpu());
}

c10::Event new_event() {
  return c10::Event{c10::kPrivateUse1, c10::EventFlag::BACKEND_DEFAULT};
}

/// Whether the host could read a byte there: the kernel says so without a
/// fault.
bool host_can_read(const void* address) {
  std::array<int, 2> ends;
  REQUIRE(pipe(ends.data()) == 0);
  auto written = write(ends[1], address, 1);
  auto refused = written < 0 && errno == EFAULT;
  close(ends[0]);
  close(ends[1]);
  return !refused;
}

struct inputs {
  Tensor x, y;          // [8, 12]
  Tensor places;        // [8, 3], of rows of x
  Tensor image, weight; // [2, 3, 8, 8], [4, 3, 3, 3]
  Tensor heads;         // [2, 4, 6, 8]

  inputs moved_to(c10::Device to) const {
    return {x.to(to),     y.to(to),      places.to(to),
            image.to(to), weight.to(to), heads.to(to)};
  }
};

inputs some_inputs() {
  torch::manual_seed(1);
  return {torch::randn({8, 12}),        torch::randn({8, 12}),
          torch::randint(0, 8, {8, 3}), torch::randn({2, 3, 8, 8}),
          torch::randn({4, 3, 3, 3}),   torch::randn({2, 4, 6, 8})};
}

const std::vector<std::pair<const char*, Tensor (*)(const inputs&)>> operators{
  {"scalar of the host",
   [](auto& in) { return in.x * torch::tensor(3.0) - 1; }},
  {"mm", [](auto& in) { return in.x.mm(in.y.t()); }},
  {"matmul", [](auto& in) { return in.heads.matmul(in.heads.mT()); }},
  {"softmax", [](auto& in) { return in.x.softmax(1); }},
  {"index", [](auto& in) { return in.x.index({in.places.select(1, 0)}); }},
  {"index by the host",
   [](auto& in) {
     return in.x.index({torch::tensor({3, 1, 1})});
   }},
  {"index_put",
   [](auto& in) {
     auto z = in.x.clone();
     z.index_put_({in.places.select(1, 0)}, in.y.select(0, 0));
     return z;
   }},
  {"masked_select", [](auto& in) { return in.x.masked_select(in.y > 0); }},
  {"unique", [](auto& in) { return std::get<0>(at::_unique(in.places)); }},
  {"cat",
   [](auto& in) {
     return at::cat({in.x, in.y}, 1);
   }},
  {"var", [](auto& in) { return in.x.var(); }},
  {"topk", [](auto& in) { return std::get<1>(in.x.topk(3)); }},
  {"layer_norm", [](auto& in) { return at::layer_norm(in.x, {12}); }},
  {"batch_norm",
   [](auto& in) {
     return at::batch_norm(in.image, {}, {}, {}, {}, true, 0.1, 1e-5, false);
   }},
  {"conv2d", [](auto& in) { return at::conv2d(in.image, in.weight); }},
  {"max_pool2d", [](auto& in) { return at::max_pool2d(in.image, 2); }},
  {"embedding", [](auto& in) { return at::embedding(in.x, in.places); }},
  {"attention",
   [](auto& in) {
     auto& q = in.heads;
     return at::scaled_dot_product_attention(q, q, q, {}, 0, true);
   }},
  {"attention with a mask",
   [](auto& in) {
     auto& q = in.heads;
     auto mask = (q[0][0].mm(q[0][0].t()) > 0).fill_diagonal_(true);
     return at::scaled_dot_product_attention(q, q, q, mask);
   }},
  {"einsum",
   [](auto& in) {
     return at::einsum("ij,kj->ik", {in.x, in.y});
   }},
  {"foreach",
   [](auto& in) {
     std::vector<Tensor> list{in.x.clone(), in.y.clone()};
     at::_foreach_mul_(list, 2.0);
     return at::stack(at::_foreach_norm(list));
   }},
  {"complex",
   [](auto& in) { return at::view_as_real(at::fft_fft(in.x)).contiguous(); }},
};

auto says(const std::string& text) {
  return MessageMatches(ContainsSubstring(text));
}

} // namespace

TEST_CASE("Torch knows the simulated device by its name", "[device]") {
  CHECK(at::getAccelerator() == c10::kPrivateUse1);
  CHECK(at::accelerator::deviceCount() == sim::config().devices);
  CHECK(c10::Device{"sim:1"} == other_device);
  CHECK(torch::ones({2}, other_device).device().str() == "sim:1");
}

TEST_CASE("tensors come to the simulated device and back", "[device]") {
  auto x = torch::randn({17, 33});
  auto there = x.to(device);
  CHECK(same(there, x));
  CHECK(same(x.t().to(device), x.t()));
  CHECK(same(there.t().contiguous(), x.t()));
  CHECK(same(x.to(device, at::kDouble), x.to(at::kDouble)));
  CHECK(same(there.to(other_device), x));
  auto part = torch::zeros({4, 33}, device);
  part.copy_(there.slice(0, 2, 6));
  CHECK(same(part, x.slice(0, 2, 6)));
}

TEST_CASE("kernels of the simulated device run behind the host", "[device]") {
  auto x = torch::ones({100}, device);
  auto stream = guard.getStream(device);
  guard.synchronizeStream(stream);
  sim::reset_most_queued(0, stream.id());
  held_stream held{stream};
  for (auto i = 0; i < 50; ++i)
    x.add_(1);
  CHECK_FALSE(guard.queryStream(stream));
  held.release();
  guard.synchronizeStream(stream);
  CHECK(guard.queryStream(stream));
  CHECK(sim::most_queued(0, stream.id()) == 50);
  CHECK(x.sum().item<float>() == 5100);
}

TEST_CASE("an event orders two streams and is done when it is reached",
          "[device]") {
  auto first = new_sim_stream(), second = new_sim_stream();
  auto begin = new_event(), end = new_event();
  CHECK(end.query());
  Tensor x, y;
  held_stream held{first};
  {
    c10::StreamGuard on{first};
    begin.record(first);
    x = torch::zeros({1000}, device);
    for (auto i = 0; i < 20; ++i)
      x.add_(1);
    end.record(first);
  }
  {
    c10::StreamGuard on{second};
    end.block(second);
    y = x * 2;
  }
  CHECK_FALSE(end.query());
  CHECK_FALSE(guard.queryStream(second));
  held.release();
  end.synchronize();
  CHECK(end.query());
  CHECK(begin.elapsedTime(end) > 0);
  c10::StreamGuard on{second};
  CHECK(y.sum().item<float>() == 40000);
  CHECK(guard.getStream(other_device).id() == 0);
}

TEST_CASE("who waits for an event means the last record before", "[device]") {
  auto first = new_sim_stream(), second = new_sim_stream();
  auto event = new_event();
  event.record(first);
  guard.synchronizeStream(first);
  event.block(second);
  held_stream held{first};
  event.record(first);
  guard.synchronizeStream(second);
  CHECK_FALSE(event.query());
}

TEST_CASE("the host cannot touch memory of the simulated device", "[device]") {
  auto x = torch::ones({10}, device);
  CHECK(host_can_read(&x));
  CHECK_FALSE(host_can_read(x.data_ptr()));
  held_stream held{guard.getStream(device)};
  x.add_(1);
  CHECK_FALSE(host_can_read(x.data_ptr()));
}

TEST_CASE("pinned memory is copied later, all other memory at once",
          "[device]") {
  auto stream = guard.getStream(device);
  auto pinned = torch::full({64}, 1.0).pin_memory();
  auto plain = torch::full({64}, 2.0);
  CHECK(pinned.is_pinned());
  CHECK_FALSE(plain.is_pinned());
  auto x = torch::empty({64}, device), y = torch::empty({64}, device);
  auto back = torch::zeros({64}, torch::TensorOptions{}.pinned_memory(true));
  guard.synchronizeStream(stream);
  held_stream held{stream};
  x.copy_(pinned, true);
  y.copy_(plain, true);
  back.copy_(x, true);
  pinned.fill_(3);
  plain.fill_(4);
  CHECK_FALSE(same(back, pinned));
  held.release();
  guard.synchronizeStream(stream);
  CHECK(same(back, torch::full({64}, 3.0)));
  CHECK(same(y, torch::full({64}, 2.0)));
  CHECK_THROWS(torch::empty({1}, torch::device(device).pinned_memory(true)));
}

TEST_CASE("pinned memory stays until what copies it", "[device]") {
  auto stream = guard.getStream(device);
  auto x = torch::empty({1 << 20}, device);
  guard.synchronizeStream(stream);
  held_stream held{stream};
  x.copy_(torch::full({1 << 20}, 5.0).pin_memory(), true);
  // Else this would take its place.
  auto other = torch::full({1 << 20}, 6.0).pin_memory();
  held.release();
  CHECK(x.sum().item<double>() == 5.0 * (1 << 20));
}

TEST_CASE("tensors of the simulated device are looked at and resized",
          "[device]") {
  auto host = torch::arange(24.0).view({4, 6});
  auto x = host.to(device);
  CHECK(same(x.view({6, 4}), host.view({6, 4})));
  CHECK(same(x.slice(1, 1, 5, 2), host.slice(1, 1, 5, 2)));
  CHECK(same(x.unfold(0, 2, 1), host.unfold(0, 2, 1)));
  CHECK(same(x.t().reshape({-1}), host.t().reshape({-1})));
  CHECK(same(x.split(2, 1)[2], host.split(2, 1)[2]));
  x[2].fill_(7);
  host[2].fill_(7);
  CHECK(same(x, host));
  auto grown = torch::ones({3}, device);
  grown.resize_({5});
  CHECK(same(grown.slice(0, 0, 3), torch::ones({3})));
  auto set = torch::empty({0}, device);
  set.set_(x.storage(), 6, {6}, {1});
  CHECK(same(set, host[1]));
  CHECK(set.is_alias_of(x));
  auto sum = torch::empty({0}, device);
  at::add_out(sum, x, x);
  CHECK(same(sum, host + host));
  auto places = torch::empty({0}, torch::device(device).dtype(at::kLong));
  at::nonzero_out(places, x > 3);
  CHECK(same(places, (host > 3).nonzero()));
}

TEST_CASE("operators give the bits of the CPU, now and when shapes are known",
          "[device]") {
  auto host = some_inputs();
  auto there = host.moved_to(device);
  for (auto& [name, run] : operators) {
    INFO(name);
    auto expected = run(host);
    for (auto round = 0; round < 2; ++round) {
      auto got = run(there);
      CHECK(got.device() == device);
      CHECK(same(got, expected));
    }
  }
}

TEST_CASE("tensors of two devices in one call are refused", "[device]") {
  auto host = torch::ones({4}), x = host.to(device);
  CHECK_THROWS_MATCHES(x + host, c10::Error, says("same device"));
  CHECK_THROWS_MATCHES(x + host.to(other_device), c10::Error,
                       says("same device"));
  CHECK_THROWS(x + torch::ones({3}, device));
}

TEST_CASE("that a kernel has failed shows at the next wait", "[device]") {
  auto x = torch::ones({3, 2}, device);
  auto place = torch::full({1}, 99, torch::device(device).dtype(at::kLong));
  x.index_select(0, place % 3); // may wait to learn the shape
  x.index_select(0, place);
  CHECK_THROWS_MATCHES(guard.synchronizeDevice(0), std::exception,
                       says("failed earlier on the device"));
  CHECK_NOTHROW(guard.synchronizeDevice(0));
}

TEST_CASE("a host function that uses the device fails", "[device]") {
  auto stream = guard.getStream(device);
  auto x = torch::ones({64}, device);
  auto pinned = torch::ones({64}).pin_memory();
  x.copy_(pinned, true);
  auto event = std::make_shared<c10::Event>(new_event());
  event->record(stream);
  auto failure_of = [&](std::function<void()> function) {
    sim::notify(0, stream.id(), std::move(function));
    try {
      guard.synchronizeStream(stream);
    } catch (const std::exception& error) {
      return std::string{error.what()};
    }
    return std::string{};
  };
  CHECK_THAT(failure_of([&] { x.add_(1); }), ContainsSubstring("aten::add"));
  CHECK_THAT(failure_of([&] { event->query(); }),
             ContainsSubstring("a query of an event"));
  CHECK_THAT(failure_of([&] { event.reset(); }),
             ContainsSubstring("freeing an event"));
  CHECK_THAT(failure_of([&] { pinned.reset(); }),
             ContainsSubstring("pinned memory"));
  CHECK(failure_of([&] { x.reset(); }).empty()); // goes back to the cache
}

TEST_CASE("random numbers of the simulated device follow from seed and offset",
          "[device]") {
  sim::changed_options options{strict_devices(500)};
  auto generator = at::globalContext().defaultGenerator(device);
  auto draw = [] { return torch::randn({50}, device).cpu(); };
  torch::manual_seed(5);
  auto first = draw();
  auto offset = generator.get_offset();
  auto second = draw();
  CHECK_FALSE(same(first, second));
  generator.set_current_seed(5);
  torch::randn({7}); // the host's numbers are others
  CHECK(same(draw(), first));
  generator.set_offset(offset);
  CHECK(same(draw(), second));
  auto before = generator.get_state();
  auto dropped = torch::dropout(torch::ones({1000}, device), 0.5, true);
  CHECK(dropped.sum().item<float>() > 800);
  generator.set_state(before);
  CHECK(same(torch::dropout(torch::ones({1000}, device), 0.5, true), dropped));
}

TEST_CASE("memory of the simulated device is counted and has an end",
          "[device]") {
  auto& allocator = *c10::getDeviceAllocator(c10::kPrivateUse1);
  auto allocated = [&] {
    return allocator.getDeviceStats(other_device.index()).allocated_bytes[0];
  };
  torch::empty({1}, other_device); // small blocks have their segment now
  allocator.emptyCache();
  allocator.resetPeakStats(other_device.index());
  auto [left, total] = allocator.getMemoryInfo(other_device.index());
  CHECK(total == sim::config().capacity);
  auto before = allocated().current;
  constexpr int64_t bytes = 64 << 20;
  {
    auto x = torch::empty({bytes},
                          torch::device(other_device).dtype(at::kByte));
    CHECK(allocator.getMemoryInfo(other_device.index()).first == left - bytes);
    CHECK(allocated().current == before + bytes);
  }
  CHECK(allocated().current == before);
  torch::empty({1}, other_device);
  CHECK(allocated().peak == before + bytes);
  allocator.resetPeakStats(other_device.index());
  CHECK(allocated().peak == before);
  allocator.emptyCache();
  CHECK(allocator.getMemoryInfo(other_device.index()).first == left);
  CHECK_THROWS_AS(torch::empty({int64_t{2} << 30}, other_device),
                  c10::OutOfMemoryError);
}

TEST_CASE("a freed block is used again after all that used it", "[device]") {
  auto first = new_sim_stream(), second = new_sim_stream();
  c10::StreamGuard on{first};
  auto x = torch::empty({5000}, device);
  const auto* place = x.data_ptr();
  x.reset();
  x = torch::empty({5000}, device);
  CHECK(x.data_ptr() == place);
  x.record_stream(second);
  guard.synchronizeStream(second);
  held_stream held{second};
  x.reset();
  auto meanwhile = torch::empty({5000}, device);
  CHECK(meanwhile.data_ptr() != place);
  held.release();
  guard.synchronizeStream(second);
  x = torch::empty({5000}, device);
  CHECK(x.data_ptr() == place);
}

TEST_CASE("foreign memory of the simulated device becomes a tensor",
          "[device]") {
  auto* arena = sim::raw_allocate(1, 4 << 20);
  {
    auto x = torch::from_blob(arena, {1000}, torch::device(other_device));
    x.fill_(3);
    CHECK(x.sum().item<float>() == 3000);
  }
  sim::raw_free(arena);
}

TEST_CASE("autocast lowers what it lowers on any device", "[device]") {
  auto x = torch::randn({4, 4}).to(device);
  at::autocast::set_autocast_enabled(c10::kPrivateUse1, true);
  at::autocast::set_autocast_dtype(c10::kPrivateUse1, at::kBFloat16);
  auto y = x.mm(x);
  auto z = y.softmax(1);
  at::autocast::clear_cache();
  at::autocast::set_autocast_enabled(c10::kPrivateUse1, false);
  auto lower = x.cpu().to(at::kBFloat16);
  CHECK(same(y, lower.mm(lower)));
  CHECK(z.scalar_type() == at::kFloat);
}

TEST_CASE("each wait of the host is counted and named", "[device]") {
  auto x = torch::ones({8}, device);
  x.masked_select(x > 0);
  sim::reset_host_waits();
  x.add_(1);
  CHECK(sim::host_waits().number == 0);
  x.sum().item<float>();
  CHECK(sim::host_waits().last == "copy to host");
  x.masked_select(x > 0);
  CHECK(sim::host_waits().last == "aten::masked_select");
  auto event = new_event();
  event.record(guard.getStream(device));
  CHECK(sim::host_waits().number == 2);
  event.synchronize();
  CHECK(sim::host_waits().last == "event");
  guard.synchronizeStream(guard.getStream(device));
  guard.synchronizeDevice(0);
  auto waits = sim::host_waits();
  CHECK(waits.number == 5);
  CHECK(waits.by_name["stream"] == 1);
  CHECK(waits.by_name["device"] == 1);
}

TEST_CASE("with always_sync every launch waits for its kernel", "[device]") {
  auto options = sim::config();
  options.always_sync = true;
  sim::changed_options changed{options};
  auto x = torch::ones({8}, device);
  sim::reset_host_waits();
  x.add_(1);
  CHECK(sim::host_waits().last == "aten::add");
  CHECK(guard.queryStream(guard.getStream(device)));
}
