#include "tests/support/catch.hpp"

#include "runtime/values/tensor_bridge.hpp"
#include "tests/support/error_of.hpp"
#include "transport/error.hpp"

#include <ATen/ATen.h>

#include <cstring>
#include <limits>
#include <vector>

using namespace smp;
using namespace smp::test;
using Catch::Matchers::ContainsSubstring;

namespace {

/// The bytes of `x` in row-major order, read element by element.
std::vector<std::byte> bytes_of(const at::Tensor& x) {
  auto flat = x.resolve_conj().resolve_neg().contiguous();
  std::vector<std::byte> result(flat.nbytes());
  if (!result.empty())
    std::memcpy(result.data(), flat.const_data_ptr(), result.size());
  return result;
}

/// The same dtype, shape and bytes.
bool same(const at::Tensor& x, const at::Tensor& y) {
  return x.scalar_type() == y.scalar_type() && x.sizes() == y.sizes()
         && bytes_of(x) == bytes_of(y);
}

/// A copy in other memory, as a transfer makes it, `offset` bytes off the
/// alignment of malloc.
tensor_ref transfer(const tensor_ref& x, size_t offset = 0) {
  auto memory = std::make_shared<std::vector<std::byte>>(x.nbytes + offset);
  if (x.nbytes > 0)
    std::memcpy(memory->data() + offset, x.data, x.nbytes);
  auto result = x;
  result.data = memory->data() + offset;
  result.owner = memory;
  return result;
}

at::Tensor random_bytes(at::IntArrayRef sizes, c10::ScalarType dtype) {
  auto result = at::empty(sizes, dtype);
  auto seeds = at::randint(0, dtype == c10::kBool ? 2 : 256,
                           {static_cast<int64_t>(result.nbytes())}, c10::kByte);
  std::memcpy(result.data_ptr(), seeds.const_data_ptr(), result.nbytes());
  return result;
}

std::string refusal(const at::Tensor& x) {
  return cause_of([&x] { to_tensor_ref(x, false); }, error_code::unsupported);
}

std::string refusal(const tensor_ref& x) {
  return cause_of([&x] { to_tensor(x); });
}

} // namespace

TEST_CASE("tensors of every dtype cross bit for bit, aligned or not") {
  auto dtype = GENERATE(
    c10::kBool, c10::kByte, c10::kChar, c10::kShort, c10::kInt, c10::kLong,
    c10::kUInt16, c10::kUInt32, c10::kUInt64, c10::kHalf, c10::kBFloat16,
    c10::kFloat, c10::kDouble, c10::kComplexHalf, c10::kComplexFloat,
    c10::kComplexDouble, c10::kFloat8_e5m2, c10::kFloat8_e4m3fn,
    c10::kFloat8_e5m2fnuz, c10::kFloat8_e4m3fnuz, c10::kFloat8_e8m0fnu,
    c10::ScalarType::Float4_e2m1fn_x2);
  CAPTURE(c10::toString(dtype));
  auto x = random_bytes({3, 5}, dtype);
  auto ref = to_tensor_ref(x, false);
  CHECK(ref.nbytes == 15 * c10::elementSize(dtype));
  CHECK(ref.shape == std::vector<int64_t>{3, 5});
  for (size_t offset : {0, 1, 8}) {
    auto y = to_tensor(transfer(ref, offset));
    CHECK(same(x, y));
    auto address = reinterpret_cast<uintptr_t>(y.const_data_ptr());
    CHECK(address % c10::elementSize(dtype) == 0);
  }
}

TEST_CASE("a tensor keeps the order of its axes in memory",
          "[runtime][values][R63]") {
  struct sample {
    at::Tensor x;
    std::vector<int64_t> strides;
    bool has_gaps = false;
  };
  auto m = at::rand({4, 6});
  auto image = at::rand({2, 3, 4, 5})
                 .contiguous(at::MemoryFormat::ChannelsLast);
  const sample samples[] = {
    {m, {6, 1}},
    {m.t(), {1, 6}},
    {at::rand({2, 3, 4}).permute({2, 0, 1}), {1, 12, 4}},
    {image, {60, 1, 15, 3}},
    // One channel, or one sample, is in its place, too.
    {at::rand({2, 4, 5, 1}).permute({0, 3, 1, 2}), {20, 1, 5, 1}},
    {at::rand({4, 1, 6}).transpose(0, 1), {6, 6, 1}},
    {at::rand({0, 3}).t(), {1, 3}},
    {at::rand({3, 0, 2}), {2, 2, 1}},
    // Gaps and repetitions do not travel.
    {m.t().slice(1, 0, 4, 2), {1, 6}, true},
    {image.slice(1, 0, 2), {40, 1, 10, 2}, true},
    {at::rand({3, 1}).expand({3, 2}), {2, 1}, true},
    {at::rand({6, 4}).t().unsqueeze(1).expand({4, 3, 6}), {1, 4, 12}, true},
  };
  for (auto& [x, strides, has_gaps] : samples) {
    CAPTURE(x.sizes(), x.strides());
    REQUIRE(at::empty_like(x).strides() == at::IntArrayRef(strides));
    for (bool snapshot : {false, true}) {
      auto ref = to_tensor_ref(x, snapshot);
      if (x.numel() > 0)
        CHECK((ref.data == x.const_data_ptr()) == !(snapshot || has_gaps));
      for (size_t offset : {0, 1}) {
        auto y = to_tensor(transfer(ref, offset));
        CHECK(y.strides() == at::IntArrayRef(strides));
        CHECK(y.sizes() == x.sizes());
        CHECK(at::equal(y, x));
      }
    }
  }
  CHECK(to_tensor_ref(m, true).strides.empty()); // row-major ones cost nothing
}

TEST_CASE("a contiguous tensor is shared, not copied, and kept alive") {
  auto x = at::rand({4, 5});
  auto copy = x.clone();
  auto ref = to_tensor_ref(x, false);
  CHECK(ref.data == x.const_data_ptr());
  auto y = to_tensor(ref);
  CHECK(y.const_data_ptr() == x.const_data_ptr());
  CHECK_FALSE(y.requires_grad());
  x.reset();
  ref = {};
  CHECK(at::equal(y, copy));
  y.add_(1); // writable
  CHECK(at::equal(y, copy + 1));
}

TEST_CASE("the memory goes when the last user of it went") {
  auto owner = std::make_shared<std::vector<float>>(6, 2.5f);
  std::weak_ptr<std::vector<float>> weak = owner;
  tensor_ref ref{{static_cast<uint8_t>(c10::kFloat), {}, {2, 3}, {}},
                 owner->data(),
                 24,
                 std::move(owner)};
  auto x = to_tensor(ref);
  auto view = x.slice(0, 1);
  ref = {};
  x.reset();
  CHECK_FALSE(weak.expired());
  CHECK(view.sum().item<float>() == 7.5f);
  view.reset();
  CHECK(weak.expired());
}

TEST_CASE("a tensor's autograd graph stays behind") {
  auto leaf = at::rand({3}).requires_grad_();
  auto x = leaf * 2;
  std::weak_ptr<torch::autograd::Node> node = x.grad_fn();
  auto shared = to_tensor_ref(x, false);
  auto copied = to_tensor_ref(x, true);
  CHECK_FALSE(to_tensor(copied).requires_grad());
  x.reset();
  CHECK(node.expired());
  CHECK(at::equal(to_tensor(shared), leaf.detach() * 2));
}

TEST_CASE("a snapshot does not see what is written later") {
  auto x = at::rand({2, 3});
  auto copy = x.clone();
  auto snapshot = to_tensor_ref(x, true);
  auto shared = to_tensor_ref(x, false);
  x.zero_();
  CHECK(at::equal(to_tensor(snapshot), copy));
  CHECK(at::equal(to_tensor(shared), x));
}

TEST_CASE("views and lazy forms of tensors arrive as what they stand for") {
  auto base = at::rand({4, 6}, c10::kComplexFloat);
  auto real = at::rand({4, 6});
  std::vector<at::Tensor> tensors{
    real.t(),
    real.slice(1, 1, 6, 2),
    real.select(0, 2),
    real.view({2, 2, 6}).permute({2, 0, 1}),
    real.narrow(0, 1, 2), // contiguous with an offset
    at::rand({3}).expand({2, 3}),
    at::rand({2, 3, 4, 5}).contiguous(at::MemoryFormat::ChannelsLast),
    base.conj(),
    at::imag(base.conj()), // negative bit
    at::_conj(base).t(),
    at::_efficientzerotensor({2, 3}, at::TensorOptions{c10::kFloat}),
    at::scalar_tensor(2.5), // no dimensions
    real.slice(0, 2, 2),    // no elements
    at::empty({0}),
    at::empty({3, 0, 2}),
    at::_lazy_clone(real),
  };
  for (size_t i = 0; i < tensors.size(); ++i) {
    for (bool snapshot : {false, true}) {
      CAPTURE(i, snapshot);
      auto& x = tensors[i];
      auto y = to_tensor(transfer(to_tensor_ref(x, snapshot)));
      auto plain = x.clone().resolve_conj().resolve_neg();
      CHECK(y.strides() == plain.strides());
      CHECK(y.sizes() == x.sizes());
      CHECK(at::equal(y, plain));
    }
  }
}

TEST_CASE("reading a lazily cloned tensor leaves it lazy") {
  auto x = at::rand({100});
  auto clone = at::_lazy_clone(x);
  auto ref = to_tensor_ref(clone, false);
  CHECK(ref.data == x.const_data_ptr());
  x.add_(1); // takes x away from the shared memory
  CHECK(at::equal(to_tensor(ref), clone));
  CHECK_FALSE(at::equal(x, clone));
}

TEST_CASE("tensors that are not plain memory are refused by name") {
  CHECK(refusal(at::Tensor{})
        == "an undefined tensor cannot be sent to another rank");
  CHECK(refusal(at::eye(3).to_sparse())
        == "a sparse tensor cannot be sent to another rank");
  CHECK(refusal(at::empty({2}, at::TensorOptions{c10::kMeta}))
        == "a tensor on device meta cannot be sent to another rank");
  CHECK(refusal(at::quantize_per_tensor(at::rand({2}), 0.1, 0, c10::kQInt8))
        == "a quantised tensor cannot be sent to another rank");
  CHECK(refusal(at::_nested_tensor_from_tensor_list({at::rand({2})}))
        == "a nested tensor cannot be sent to another rank");
  CHECK(refusal(at::empty({2}, c10::ScalarType::Bits8))
        == "a tensor of dtype Bits8 cannot be sent to another rank");
}

TEST_CASE("a received tensor whose parts do not fit together is refused") {
  auto good = to_tensor_ref(at::rand({2, 3}), true);
  CHECK(refusal(good) == "no error");
  auto with = [&](auto change) {
    auto x = good;
    change(x);
    return refusal(x);
  };
  CHECK(with([](auto& x) { x.nbytes = 23; })
        == "received tensor: 23 bytes, but its shape needs 24");
  CHECK(with([](auto& x) {
          x.shape = {2, 4};
        })
        == "received tensor: 24 bytes, but its shape needs 32");
  CHECK(with([](auto& x) {
          x.shape = {-2, -3};
        })
        == "received tensor: negative size -2");
  CHECK(with([](auto& x) {
          x.shape = {int64_t{1} << 61, 8, 3};
        })
        == "received tensor: its size overflows");
  CHECK(with([](auto& x) {
          x.shape = {0, int64_t{1} << 61, int64_t{1} << 61};
          x.nbytes = 0;
        })
        == "received tensor: its size overflows");
  auto with_strides = [&](std::vector<int64_t> strides) {
    return with([&](auto& x) { x.strides = std::move(strides); });
  };
  CHECK(with_strides({1, 2}) == "no error");
  constexpr auto huge = std::numeric_limits<int64_t>::max();
  for (auto& strides : std::vector<std::vector<int64_t>>{{1},
                                                         {1, 2, 6},
                                                         {1, 1},
                                                         {1, 3},
                                                         {2, 1},
                                                         {6, 1},
                                                         {0, 1},
                                                         {-3, 1},
                                                         {huge, 1}})
    CHECK(with_strides(strides)
          == "received tensor: its strides do not fit its shape");
  for (int code : {12, 22, 46, 47, 255})
    CHECK(with([&](auto& x) { x.dtype = static_cast<uint8_t>(code); })
          == "received tensor: unknown dtype " + std::to_string(code));
  CHECK(with([](auto& x) { x.data = nullptr; })
        == "received tensor: it has no data");
  CHECK_THAT(with([](auto& x) { x.device.type = 1; }),
             ContainsSubstring("device type 1 cannot be sent"));
  CHECK_THAT(with([](auto& x) {
               x.home = {20, 0};
             }),
             ContainsSubstring("device type 20 cannot be sent"));
}
