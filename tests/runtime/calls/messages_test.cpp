#include "tests/support/catch.hpp"

#include "tests/support/allocated.hpp"
#include "tests/support/error_of.hpp"
#include "tests/support/mutations.hpp"
#include "tests/support/torch/messages.hpp"

#include <ATen/ATen.h>

#include <cstring>
#include <random>

using namespace smp;
using namespace smp::test;
using Catch::Matchers::ContainsSubstring;

namespace {

bool same(const payload& x, const payload& y) {
  if (x.bytes != y.bytes || x.tensors.size() != y.tensors.size())
    return false;
  for (size_t i = 0; i < x.tensors.size(); ++i) {
    auto& a = x.tensors[i];
    auto& b = y.tensors[i];
    // What varies is written anew, all else is passed on.
    if (a.nbytes != b.nbytes || a.dtype != b.dtype || a.shape != b.shape
        || (a.nbytes > 0 && std::memcmp(a.data, b.data, a.nbytes) != 0))
      return false;
  }
  return true;
}

/// @returns the text of the protocol error, or "no error" if `x` can be read.
std::string refusal_of(const message_type& m, const payload& x) {
  return error_of([&] { m.again(x); }, error_code::protocol);
}

} // namespace

TEST_CASE("every message can be read, and written again as it was",
          "[runtime][messages]") {
  for (auto& m : all_messages()) {
    INFO(m.name);
    CHECK(same(m.again(m.sent), m.sent));
  }
}

TEST_CASE("a call keeps everything on its way", "[runtime][messages]") {
  auto x = some_call();
  auto y = from_payload<forward_request>(to_payload(x), "request");
  CHECK(y.head.what == request_kind::range);
  CHECK(y.head.first == 2);
  CHECK(y.head.last == 5);
  CHECK((y.context == x.context));
  CHECK_FALSE(y.training);
  CHECK(y.invoker == x.invoker);
  CHECK(y.name == "forward");
  CHECK(y.numbers.path == 7);
  CHECK((y.numbers.counts == x.numbers.counts));
  CHECK((y.arguments == x.arguments));
  CHECK(y.left == std::vector<uint32_t>{3, 0});
  CHECK_FALSE(y.expected);
  REQUIRE(y.tensors.size() == x.tensors.size());
  for (size_t i = 0; i < y.tensors.size(); ++i) {
    CHECK(y.tensors[i].what == x.tensors[i].what);
    CHECK(y.tensors[i].requires_grad == x.tensors[i].requires_grad);
    CHECK(y.tensors[i].index == x.tensors[i].index);
    CHECK(y.tensors[i].object == x.tensors[i].object);
    CHECK(y.tensors[i].content.defined() == x.tensors[i].content.defined());
  }
  CHECK(at::equal(y.tensors[0].content, at::arange(6).view({2, 3})));
  auto z = from_payload<forward_request>(to_payload(some_promised_call()),
                                         "request");
  REQUIRE(z.expected);
  CHECK((z.expected->result == value::tensor(0)));
  REQUIRE(z.expected->tensors.size() == 2);
  CHECK(z.expected->tensors[0].meta.dtype == static_cast<uint8_t>(c10::kHalf));
  CHECK(z.expected->tensors[0].meta.shape == std::vector<int64_t>{-1, -1});
  CHECK(z.expected->tensors[0].requires_grad);
  CHECK(z.expected->tensors[1].meta.dtype == static_cast<uint8_t>(c10::kLong));
  CHECK(z.left == std::vector<uint32_t>{1});
}

TEST_CASE("replies keep everything on their way", "[runtime][messages]") {
  auto x = some_reply();
  auto y = from_payload<call_reply>(to_payload(x), "reply");
  CHECK((y.result == x.result));
  CHECK((y.changed == x.changed));
  CHECK(y.tensors.size() == x.tensors.size());
  REQUIRE(y.written.size() == 2);
  CHECK(y.written[1].argument == 2);
  CHECK(y.written[1].content == 4);
  CHECK(y.stateful);
  CHECK((y.reaches == x.reaches));
}

TEST_CASE("a backward keeps everything on its way", "[runtime][messages]") {
  auto x = some_backward();
  auto y = from_payload<backward_request>(to_payload(x), "request");
  CHECK(y.head.what == request_kind::backward);
  CHECK((y.context == x.context));
  CHECK(y.origin == rank_id{3});
  CHECK(y.call == 11);
  CHECK(y.keep_graph);
  CHECK(y.gradients.size() == x.gradients.size());
  REQUIRE(y.wanted.size() == 2);
  CHECK(y.wanted[0].push);
  CHECK(y.wanted[1].argument == 4);
  CHECK_FALSE(y.wanted[1].push);
  CHECK(y.promised);
}

TEST_CASE("requests about parameters and objects keep everything",
          "[runtime][messages]") {
  for (auto what : {request_kind::read_tensor, request_kind::write_tensor,
                    request_kind::add_gradient}) {
    auto x = from_payload<parameter_request>(to_payload(about(what)), "x");
    CHECK(x.head.what == what);
    CHECK(x.head.tensor == 40);
    CHECK((x.value.data == nullptr) == (what == request_kind::read_tensor));
  }
  auto there = [](object_message x) {
    return from_payload<object_message>(to_payload(x), "object message");
  };
  auto fetch = std::get<object_fetch>(there(object_fetch{{5, 6}}));
  CHECK(fetch.id.of(rank_id{2}) == object_id{rank_id{2}, 5, 6});
  failure why{error_code::rank_down, rank_id{1}, "m", "is dead"};
  auto refusal = std::get<object_refusal>(there(object_refusal{{5, 6}, why}));
  CHECK(refusal.why == why);
  auto release = std::get<object_release>(there(object_release{{{5, 6}}}));
  REQUIRE(release.ids.size() == 1);
  CHECK(release.ids[0].generation == 6);
}

TEST_CASE("the head of any request can be read alone", "[runtime][messages]") {
  auto call = read_head(to_payload(some_call()));
  CHECK(call.what == request_kind::range);
  CHECK(call.first == 2);
  CHECK(call.last == 5);
  CHECK(read_head(to_payload(some_backward())).what == request_kind::backward);
  auto write = read_head(to_payload(about(request_kind::write_tensor)));
  CHECK(write.what == request_kind::write_tensor);
  CHECK(write.tensor == 40);
  CHECK_THROWS_WITH(read_head({{std::byte{11}}, {}}),
                    "malformed request: kind of work at byte 0: there is no "
                    "value 11");
}

TEST_CASE("a damaged answer still says which fetch it answers",
          "[runtime][messages]") {
  auto named = [](const object_message& x) {
    auto sent = to_payload(x);
    sent.tensors.clear();
    auto result = answered_fetch(sent);
    return result ? result->number : 0;
  };
  CHECK(named(object_content{{5, 6}, make_tensor(3, 1)}) == 5);
  CHECK(named(object_refusal{{7, 6}, {}}) == 7);
  CHECK(named(object_fetch{{8, 6}}) == 0);
  CHECK(named(object_release{{{9, 6}}}) == 0);
  CHECK_FALSE(answered_fetch({}));
  CHECK_FALSE(answered_fetch({{std::byte{1}, std::byte{0}}, {}}));
}

// -- hostile messages ---------------------------------------------------------

TEST_CASE("every truncation of a message is refused", "[runtime][messages]") {
  for (auto& m : all_messages()) {
    INFO(m.name);
    auto& bytes = m.sent.bytes;
    for (size_t n = 0; n < bytes.size(); ++n) {
      CAPTURE(n);
      payload cut{{bytes.begin(), bytes.begin() + static_cast<ptrdiff_t>(n)},
                  m.sent.tensors};
      CHECK_THAT(refusal_of(m, cut),
                 ContainsSubstring(std::string{"malformed "} + m.name));
    }
    auto x = m.sent;
    x.bytes.push_back({});
    CHECK(refusal_of(m, x) != "no error");
    x = m.sent;
    x.tensors.push_back(make_tensor(3, 1));
    CHECK(refusal_of(m, x) != "no error");
    if (!m.sent.tensors.empty()) {
      x = m.sent;
      x.tensors.pop_back();
      CHECK(refusal_of(m, x) != "no error");
    }
  }
}

TEST_CASE("a mutated message is refused or another message",
          "[runtime][messages]") {
  std::mt19937_64 engine{20260103};
  for (auto& m : all_messages()) {
    if (m.sent.bytes.empty())
      continue;
    size_t refused = 0;
    constexpr int rounds = 3000;
    for (int round = 0; round < rounds; ++round) {
      payload x{mutated(m.sent.bytes, engine), m.sent.tensors};
      auto size = x.bytes.size() + 4096; // the stream has 2.5 KB
      if (!x.tensors.empty() && engine() % 4 == 0) {
        auto& t = x.tensors[engine() % x.tensors.size()];
        if (t.nbytes > 0)
          t.nbytes = engine() % t.nbytes;
        t.dtype = static_cast<uint8_t>(engine());
      }
      allocated = 0;
      try {
        auto y = m.again(x);
        if (y.bytes != x.bytes)
          FAIL(m.name << ", round " << round << ": other bytes");
      } catch (const error& e) {
        if (e.code() != error_code::protocol)
          FAIL(m.name << ", round " << round << ": " << e.what());
        ++refused;
      }
      if (allocated > 200 * size)
        FAIL(m.name << ", round " << round << " took " << allocated
                    << " bytes");
    }
    INFO(m.name << ": " << refused << " of " << rounds << " refused");
    CHECK(refused > rounds / 10);
    CHECK(refused < rounds);
  }
}

TEST_CASE("what no correct rank sends is refused by its field",
          "[runtime][messages]") {
  auto refusal = [](auto x) {
    return refusal_of(type_of("message", x), to_payload(x));
  };
  auto call = some_call();
  call.context.autocast = {{c10::kCPU, c10::kLong}};
  CHECK_THAT(refusal(call), ContainsSubstring("context.autocast.dtype at"));
  call = some_promised_call();
  call.expected->tensors[0].meta.dtype = 200;
  CHECK_THAT(refusal(call),
             ContainsSubstring("expected.tensors.meta.dtype at"));
  object_message nothing = object_refusal{{5, 6}, {}};
  CHECK_THAT(refusal(nothing), ContainsSubstring("why at"));
  auto with = [](const remote_tensors& xs) {
    call_reply result;
    result.tensors = xs;
    return result;
  };
  auto tensors = with(some_tensors());
  tensors.tensors[2].what = static_cast<remote_tensor::kind>(7);
  CHECK_THAT(refusal(tensors),
             ContainsSubstring("tensors.kind at byte 13: there is no value"));
  auto held = remote_tensor::held(at::empty({4, 2}));
  held.meta.shape[1] = -2;
  CHECK_THAT(refusal(with({held})), ContainsSubstring("tensors.meta.sizes at"));
  held = remote_tensor::held(at::empty({4, 2}));
  held.meta.dtype = 200;
  CHECK_THAT(refusal(with({held})), ContainsSubstring("tensors.meta.dtype at"));
  auto carried = to_payload(with({remote_tensor::of(at::ones({3}), false)}));
  carried.tensors[0].shape = {4};
  CHECK_THAT(error_of([&] { from_payload<call_reply>(carried, "reply"); },
                      error_code::protocol),
             ContainsSubstring("its shape needs 16"));
  held = remote_tensor::held(at::empty({4, 2}).t());
  REQUIRE(held.meta.strides == std::vector<int64_t>{1, 2});
  held.meta.strides[1] = 4;
  CHECK_THAT(refusal(with({held})),
             ContainsSubstring("tensors.meta.strides at"));
}
