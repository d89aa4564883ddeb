#include "tests/support/catch.hpp"

#include "actors/protocol/result_name.hpp"
#include "runtime/values/tensor_bridge.hpp"
#include "tests/support/error_of.hpp"
#include "tests/support/torch/lone_rank.hpp"

#include <ATen/ATen.h>

// What a rank does with a request of another one: struct in, struct out.

using namespace smp;
using namespace smp::test;
using Catch::Matchers::ContainsSubstring;

namespace {

/// Asks for one tensor times three.
forward_request tripled(const at::Tensor& x) {
  forward_request result;
  result.name = "forward";
  result.arguments = value::tuple({value::tensor(0)});
  result.tensors = {remote_tensor::of(x, false)};
  return result;
}

void set_tripling(lone_rank& rank) {
  rank.set_code([](unpacker& in, const std::vector<value>& args, packer& out) {
    return put_value(out, get_value<at::Tensor>(in, args.at(0)) * 3);
  });
}

at::Tensor with_grad(at::Tensor x) {
  return x.set_requires_grad(true);
}

backward_request backward_of(uint64_t number, const at::Tensor& gradient) {
  backward_request result;
  result.context.grad = false;
  result.origin = rank_id{1};
  result.call = static_cast<uint32_t>(number);
  result.gradients = {remote_tensor::of(gradient, false)};
  result.wanted = {{0, true}};
  return result;
}

/// What the caller of a promise expects.
prediction one_tensor(bool requires_grad) {
  return {value::tensor(0),
          {remote_tensor::foretold(c10::kFloat, requires_grad, 1)}};
}

/// The number that requests have in the step of `lone_rank`.
uint64_t numbered(uint32_t call) {
  return request_number(step_id{1}, call);
}

/// What a result of a request is called.
object_id result_of(uint32_t call, size_t position = 0) {
  return result_name(rank_id{0}, {rank_id{1}, numbered(call)}, step_id{1},
                     position);
}

} // namespace

TEST_CASE("a call is answered with its results", "[runtime][callee]") {
  lone_rank rank;
  set_tripling(rank);
  auto asked = tripled(at::arange(4.0));
  asked.head.what = request_kind::range;
  asked.head.first = 2;
  asked.head.last = 4;
  asked.training = false;
  asked.invoker = 77;
  auto reply = from_payload<call_reply>(rank.serve(asked), "reply");
  CHECK(rank.wanted.kind == request_kind::range);
  CHECK(rank.wanted.first == 2);
  CHECK(rank.wanted.last == 4);
  CHECK_FALSE(rank.wanted.training);
  CHECK(rank.wanted.invoker == 77);
  CHECK(rank.wanted.name == "forward");
  CHECK((reply.result == value::tensor(0)));
  REQUIRE(reply.tensors.size() == 1);
  CHECK(at::equal(reply.tensors[0].content, at::arange(4.0) * 3));
  CHECK_FALSE(reply.tensors[0].requires_grad);
  CHECK_FALSE(reply.stateful);
  CHECK(reply.written.empty());
  CHECK(rank.calls().size() == 0);
}

TEST_CASE("a result that is an argument or a parameter does not travel",
          "[runtime][callee]") {
  lone_rank rank;
  rank.set_code([&](unpacker& in, const std::vector<value>& args, packer& out) {
    auto x = get_value<at::Tensor>(in, args.at(0));
    x.add_(1);
    return put_value(out, std::vector<at::Tensor>{x, rank.model.mine->weight});
  });
  auto reply = from_payload<call_reply>(rank.serve(tripled(at::ones({2}))),
                                        "reply");
  REQUIRE(reply.tensors.size() == 3);
  CHECK(reply.tensors[0].what == remote_tensor::kind::argument);
  CHECK(reply.tensors[0].index == 0);
  CHECK(reply.tensors[1].what == remote_tensor::kind::parameter);
  CHECK(reply.tensors[1].index == 0);
  // What was written into the argument is one more.
  REQUIRE(reply.written.size() == 1);
  CHECK(reply.written[0].argument == 0);
  CHECK(reply.written[0].content == 2);
  CHECK(at::equal(reply.tensors[2].content, at::full({2}, 2.0)));
}

TEST_CASE("results stay under their names, and those to be held do not travel",
          "[runtime][callee][R38]") {
  lone_rank rank;
  set_tripling(rank);
  auto asked = tripled(at::ones({2}));
  auto held = GENERATE(std::vector<uint32_t>{}, std::vector<uint32_t>{0});
  asked.left = held;
  auto reply = from_payload<call_reply>(rank.serve(asked, numbered(5)),
                                        "reply");
  CHECK(reply.named == 1);
  REQUIRE(reply.tensors.size() == 1);
  auto& x = reply.tensors[0];
  if (held.empty()) {
    CHECK(at::equal(x.content, at::full({2}, 3.0)));
  } else {
    REQUIRE(x.what == remote_tensor::kind::held);
    CHECK(x.meta.shape == std::vector<int64_t>{2});
    CHECK(x.meta.dtype == static_cast<uint8_t>(at::kFloat));
  }
  auto kept = rank.objects().find(result_of(5));
  REQUIRE(kept);
  CHECK(at::equal(*kept, at::full({2}, 3.0)));
}

TEST_CASE("a call draws from the stream that its path gives, wherever it runs",
          "[runtime][callee][R23]") {
  lone_rank rank;
  rank.set_code([](unpacker&, const std::vector<value>&, packer& out) {
    return put_value(out, at::rand({2}));
  });
  auto asked = tripled(at::ones({2}));
  asked.numbers.path = 42;
  auto before = random_stream::of_default();
  auto reply = from_payload<call_reply>(rank.serve(asked), "reply");
  CHECK(random_stream::of_default() == before);
  auto expected = random_stream::derived(call_seed(0, 42));
  expected.swap_with_default();
  CHECK(at::equal(reply.tensors.at(0).content, at::rand({2})));
  expected.swap_with_default();
  // Nothing else depends on what it drew.
  CHECK_FALSE(reply.stateful);
}

TEST_CASE("backward answers with the gradients that are wanted, once",
          "[runtime][callee]") {
  lone_rank rank;
  set_tripling(rank);
  auto asked = tripled(with_grad(at::ones({2})));
  auto reply = from_payload<call_reply>(rank.serve(asked, numbered(5)),
                                        "reply");
  CHECK(reply.tensors.at(0).requires_grad);
  CHECK(rank.calls().size() == 1);
  auto back = backward_of(5, at::full({2}, 10.0));
  auto answer = from_payload<call_reply>(rank.serve(back, numbered(6)),
                                         "reply");
  REQUIRE(answer.tensors.size() == 1);
  CHECK(at::equal(answer.tensors[0].content, at::full({2}, 30.0)));
  CHECK_THAT(failure_of([&] { rank.serve(back, numbered(7)); }).text,
             ContainsSubstring("backward a second time through 'mine'"));
}

TEST_CASE("a promise is kept under the names of its caller",
          "[runtime][callee][R38]") {
  lone_rank rank{true};
  set_tripling(rank);
  auto asked = tripled(with_grad(at::ones({2})));
  asked.expected = one_tensor(true);
  asked.left.emplace();
  auto reply = from_payload<call_reply>(rank.serve(asked, numbered(5)),
                                        "reply");
  CHECK((reply.reaches == reached_positions{{0}}));
  REQUIRE(reply.tensors.size() == 1);
  CHECK(at::equal(reply.tensors[0].content, at::full({2}, 3.0)));
  auto held = rank.objects().find(result_of(5));
  REQUIRE(held);
  CHECK(at::equal(*held, at::full({2}, 3.0)));
  // So are its gradients.
  auto back = backward_of(5, at::full({2}, 10.0));
  back.promised = true;
  back.wanted = {{0, false}};
  auto answer = from_payload<call_reply>(rank.serve(back, numbered(6)),
                                         "reply");
  REQUIRE(answer.tensors.size() == 1);
  CHECK(answer.tensors[0].what == remote_tensor::kind::held);
  CHECK(answer.tensors[0].meta.shape == std::vector<int64_t>{2});
  auto gradient = rank.objects().find(result_of(6));
  REQUIRE(gradient);
  CHECK(at::equal(*gradient, at::full({2}, 30.0)));
}

TEST_CASE("arguments, results and gradients keep the order of their axes",
          "[runtime][callee][R63]") {
  lone_rank rank{true};
  using strides = std::vector<int64_t>;
  strides seen;
  rank.set_code([&](unpacker& in, const std::vector<value>& args, packer& out) {
    auto x = get_value<at::Tensor>(in, args.at(0));
    seen = x.strides().vec();
    return put_value(out, x * 3);
  });
  auto x = at::arange(6.0).view({2, 3}).t(); // [3, 2]
  auto asked = tripled(with_grad(x.detach()));
  auto ask = [&](uint32_t call) { return rank.serve(asked, numbered(call)); };
  auto got = from_payload<call_reply>(ask(5), "reply").tensors.at(0);
  CHECK(seen == strides{1, 3});
  CHECK(got.content.strides() == at::IntArrayRef({1, 3}));
  CHECK(at::equal(got.content, x * 3));
  // Whether AccumulateGrad would give it the strides of the argument, or not.
  for (auto& gradient : {at::ones({3, 2}), at::ones({2, 3}).t()}) {
    auto back = backward_of(5, gradient);
    back.keep_graph = true;
    auto answer = from_payload<call_reply>(rank.serve(back, numbered(6)),
                                           "reply");
    auto y = answer.tensors.at(0).content;
    CHECK(y.strides() == gradient.strides());
    CHECK(at::equal(y, at::full({3, 2}, 3.0)));
  }
  asked.left = std::vector<uint32_t>{0};
  got = from_payload<call_reply>(ask(7), "reply").tensors.at(0);
  REQUIRE(got.what == remote_tensor::kind::held);
  CHECK(got.meta.strides == strides{1, 3});
  asked.expected = one_tensor(true);
  asked.left.emplace();
  auto reply = from_payload<call_reply>(ask(8), "reply");
  CHECK(reply.tensors.at(0).content.strides() == at::IntArrayRef({1, 3}));
  asked.tensors = {remote_tensor::of(with_grad(at::ones({3, 2})), false)};
  got = from_payload<call_reply>(ask(9), "reply").tensors.at(0);
  CHECK(got.meta.strides.empty());
}

TEST_CASE("a promise that cannot be kept is said to be broken",
          "[runtime][callee][R38]") {
  lone_rank rank{true};
  set_tripling(rank);
  auto expected = one_tensor(false);
  std::string why;
  SECTION("by another dtype") {
    expected.tensors[0].meta.dtype = static_cast<uint8_t>(c10::kHalf);
    why = "result 0 has dtype Float";
  }
  SECTION("by a gradient") {
    expected.tensors[0].requires_grad = true;
    why = "result 0 does not require grad";
  }
  SECTION("by another structure") {
    expected.result = value::list({value::tensor(0)});
    why = "its result has another structure";
  }
  SECTION("by a change of the argument") {
    rank.set_code(
      [](unpacker& in, const std::vector<value>& args, packer& out) {
        auto x = get_value<at::Tensor>(in, args.at(0));
        x.add_(1);
        return put_value(out, x * 3);
      });
    why = "it changed its tensor argument 0 in place";
  }
  auto asked = tripled(at::ones({2}));
  asked.expected = expected;
  auto failed = failure_of([&] { rank.serve(asked); });
  CHECK(failed.code == error_code::unsupported);
  CHECK(failed.module == "mine");
  CHECK_THAT(failed.text, ContainsSubstring(why)
                            && ContainsSubstring("list 'mine' in "
                                                 "smp.no_promises"));
}

TEST_CASE("only own tensors are read, written and given gradients",
          "[runtime][callee][R14]") {
  lone_rank rank;
  auto ask = [&](request_kind what, uint32_t tensor, at::Tensor x) {
    parameter_request result;
    result.head.what = what;
    result.head.tensor = tensor;
    if (x.defined())
      result.value = to_tensor_ref(x, true);
    return rank.serve(result);
  };
  auto& weight = rank.model.mine->weight;
  auto got = from_payload<parameter_reply>(
    ask(request_kind::read_tensor, 0, {}), "reply");
  CHECK(at::equal(to_tensor(got.value), weight));
  ask(request_kind::add_gradient, 0, at::full({3}, 4.0));
  ask(request_kind::add_gradient, 0, at::full({3}, 1.0));
  CHECK(at::equal(weight.grad(), at::full({3}, 5.0)));
  for (int64_t size : {1, 2, 4}) { // also what could be added
    auto other = at::ones({size});
    CHECK_THAT(cause_of([&] { ask(request_kind::add_gradient, 0, other); },
                        error_code::protocol),
               ContainsSubstring("a gradient of the sizes ["
                                 + std::to_string(size)
                                 + "] for 'mine.weight' of the sizes [3]"));
  }
  CHECK(at::equal(weight.grad(), at::full({3}, 5.0)));
  ask(request_kind::write_tensor, 0, at::full({3}, 7.0));
  CHECK(at::equal(weight, at::full({3}, 7.0)));
  CHECK(at::equal(to_tensor(got.value), at::full({3}, 2.0))); // a copy
  for (uint32_t of_others : {1, 99}) {
    auto failed = failure_of(
      [&] { ask(request_kind::read_tensor, of_others, {}); });
    CHECK(failed.code == error_code::protocol);
    CHECK_THAT(failed.text, ContainsSubstring("does not own"));
  }
}

TEST_CASE("requests that no correct rank sends are refused",
          "[runtime][callee]") {
  lone_rank rank;
  set_tripling(rank);
  auto asked = tripled(at::ones({2}));
  std::string why;
  SECTION("arguments that are not a tuple") {
    asked.arguments = value::tensor(0);
    why = "not a tuple";
  }
  SECTION("an argument without a tensor") {
    asked.arguments = value::tuple({value::tensor(1)});
    why = "names tensor 1 of 1";
  }
  SECTION("an unknown parameter") {
    asked.tensors = {remote_tensor::parameter(99)};
    why = "unknown parameter";
  }
  SECTION("a result that the request does not need") {
    asked.tensors = {remote_tensor::needed(0, false)};
    why = "names needed result 0 of 0";
  }
  SECTION("an argument that names itself") {
    asked.tensors = {remote_tensor::argument(0)};
    why = "names itself";
  }
  auto failed = failure_of([&] { rank.serve(asked); });
  CHECK(failed.code == error_code::protocol);
  CHECK_THAT(failed.text, ContainsSubstring(why));
}

TEST_CASE("a result that is part of a parameter is copied when it is sent",
          "[runtime][callee][R13]") {
  lone_rank rank;
  auto& weight = rank.model.mine->weight;
  at::Tensor own;
  rank.set_code([&](unpacker&, const std::vector<value>&, packer& out) {
    own = at::full({2}, 2.0);
    return put_value(out, std::vector<at::Tensor>{weight.narrow(0, 0, 2), own});
  });
  auto asked = tripled(at::ones({2}));
  asked.context.grad = false;
  auto held = GENERATE(false, true);
  CAPTURE(held);
  if (held)
    asked.left = {0, 1};
  auto reply = from_payload<call_reply>(rank.serve(asked, numbered(5)),
                                        "reply");
  REQUIRE(reply.tensors.size() == 2);
  // Another microbatch, or the optimizer, before the bytes are away.
  weight.detach().fill_(7);
  own.fill_(7);
  auto content = [&](size_t i) {
    return held ? *rank.objects().find(result_of(5, i))
                : reply.tensors[i].content;
  };
  CHECK(at::equal(content(0), at::full({2}, 2.0)));
  // Nobody else writes what a module made, so nobody copies it.
  CHECK(at::equal(content(1), at::full({2}, 7.0)));
}
