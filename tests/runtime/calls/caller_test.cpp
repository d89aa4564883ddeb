#include "tests/support/catch.hpp"

#include "actors/protocol/request_number.hpp"
#include "runtime/values/tensor_bridge.hpp"
#include "tests/support/error_of.hpp"
#include "tests/support/torch/lone_rank.hpp"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/variable.h>

// What a rank asks of another one, and what it makes of the answer: structs
// out, structs in.

using namespace smp;
using namespace smp::test;
using Catch::Matchers::ContainsSubstring;

namespace {

constexpr module_id theirs{2};

call_result call_theirs(const std::vector<at::Tensor>& xs,
                        call_target target = {}) {
  packer in;
  std::vector<value> args;
  for (auto& x : xs)
    args.push_back(put_value(in, x));
  return call_remote(rank_id{1}, theirs, target, in, std::move(args));
}

/// Results that have a gradient at their owner.
call_reply reply_with(std::vector<at::Tensor> xs) {
  call_reply result;
  std::vector<value> items;
  for (auto& x : xs) {
    items.push_back(
      value::tensor(static_cast<uint32_t>(result.tensors.size())));
    result.tensors.push_back(remote_tensor::of(x, true));
    result.tensors.back().requires_grad = true;
  }
  result.result = value::tuple(std::move(items));
  return result;
}

forward_request asked_of(const call& x) {
  return from_payload<forward_request>(x.body, "request");
}

} // namespace

TEST_CASE("a call asks its owner, and returns what that answers",
          "[runtime][caller]") {
  lone_rank rank;
  auto& ex = rank.running();
  ex.answer(reply_with({at::full({2}, 9.0)}));
  call_target target;
  target.kind = request_kind::method_range;
  target.name = "encode";
  target.first = 1;
  target.last = 3;
  target.training = false;
  auto got = call_theirs({at::ones({2}), rank.model.theirs->weight}, target);
  REQUIRE(ex.sent.size() == 1);
  CHECK(ex.sent[0].owner == rank_id{1});
  CHECK(ex.sent[0].module == theirs);
  CHECK(ex.sent[0].what == phase::forward);
  auto asked = asked_of(ex.sent[0]);
  CHECK(asked.head.what == request_kind::method_range);
  CHECK(asked.head.first == 1);
  CHECK(asked.head.last == 3);
  CHECK(asked.name == "encode");
  CHECK_FALSE(asked.training);
  CHECK_FALSE(asked.left);
  CHECK_FALSE(asked.expected);
  REQUIRE(asked.tensors.size() == 2);
  CHECK(at::equal(asked.tensors[0].content, at::ones({2})));
  // A parameter stays with its owner.
  CHECK(asked.tensors[1].what == remote_tensor::kind::parameter);
  CHECK(asked.tensors[1].index == 1);
  CHECK(at::equal(got.tensors.tensor(0), at::full({2}, 9.0)));
}

TEST_CASE("a call says which one it is, and draws nothing here",
          "[runtime][caller][R23]") {
  lone_rank rank;
  auto& ex = rank.running();
  auto before = random_stream::of_default();
  ex.streams().enter_body();
  auto module = path_of_module("theirs");
  auto body = random_stream::of_default();
  for (uint64_t i = 0; i < 2; ++i) {
    ex.answer(reply_with({at::ones({1})}));
    call_theirs({at::ones({2})});
    auto numbers = asked_of(ex.sent.back()).numbers;
    CHECK(numbers.path == path_of_call(0, module, i));
    CHECK(numbers.counts.empty());
  }
  CHECK(random_stream::of_default() == body);
  ex.streams().leave();
  CHECK(random_stream::of_default() == before);
}

TEST_CASE("what the owner wrote into an argument is written back",
          "[runtime][caller][R12]") {
  lone_rank rank;
  auto reply = reply_with({at::ones({2}), at::full({2}, 4.0)});
  reply.result = value::tensor(0);
  reply.written = {{0, 1}};
  reply.changed = {{1, value::of(int64_t{8})}};
  reply.stateful = true;
  rank.running().answer(reply);
  auto x = at::zeros({2});
  auto got = call_theirs({x});
  CHECK(at::equal(x, at::full({2}, 4.0)));
  REQUIRE(got.changed.size() == 1);
  CHECK(got.changed[0].first == 1);
  CHECK((got.changed[0].second == value::of(int64_t{8})));
  CHECK(rank.running().met_state());
}

TEST_CASE("a result may be what the caller has", "[runtime][caller]") {
  lone_rank rank;
  call_reply reply;
  reply.result = value::tuple({value::tensor(0), value::tensor(1)});
  reply.tensors = {remote_tensor::argument(0), remote_tensor::parameter(0)};
  rank.running().answer(reply);
  auto x = at::zeros({2});
  auto got = call_theirs({x});
  CHECK(got.tensors.tensor(0).is_same(x));
  CHECK(got.tensors.tensor(1).is_same(rank.model.mine->weight));
}

TEST_CASE("an answer that names what does not exist is refused",
          "[runtime][caller]") {
  lone_rank rank;
  auto reply = reply_with({at::ones({2})});
  std::string why;
  SECTION("an argument") {
    reply.tensors = {remote_tensor::argument(1)};
    why = "answer of 'theirs': argument 1 does not exist";
  }
  SECTION("a parameter") {
    reply.tensors = {remote_tensor::parameter(9)};
    why = "answer of 'theirs': parameter 9 does not exist";
  }
  SECTION("a written argument") {
    reply.written = {{3, 0}};
    why = "answer of 'theirs': argument 3 does not exist";
  }
  SECTION("the content of one") {
    reply.written = {{0, 3}};
    why = "answer of 'theirs': content 3 does not exist";
  }
  rank.running().answer(reply);
  CHECK(cause_of([&] { call_theirs({at::ones({2})}); }) == why);
}

TEST_CASE("backward asks for the gradients that its graph needs",
          "[runtime][caller][R3]") {
  lone_rank rank;
  auto& ex = rank.running();
  ex.answer(reply_with({at::full({2}, 3.0), at::full({2}, 5.0)}));
  auto x = at::ones({2}).set_requires_grad(true);
  auto got = call_theirs({at::ones({1}), x});
  auto y = got.tensors.tensor(1);
  CHECK(y.requires_grad());
  call_reply answer;
  answer.tensors = {remote_tensor::of(at::full({2}, 30.0), false)};
  ex.answer(answer);
  {
    running_call::backward_scope running{ex};
    torch::autograd::Engine::get_default_engine().execute(
      {torch::autograd::impl::gradient_edge(y)}, {at::full({2}, 10.0)}, false,
      false, true);
  }
  CHECK(at::equal(x.grad(), at::full({2}, 30.0)));
  REQUIRE(ex.sent.size() == 2);
  CHECK(ex.sent[1].owner == rank_id{1});
  CHECK(ex.sent[1].what == phase::backward);
  auto asked = from_payload<backward_request>(ex.sent[1].body, "request");
  CHECK(asked.origin == rank_id{0});
  CHECK(asked.call == 1); // what the answer said
  CHECK_FALSE(asked.keep_graph);
  CHECK_FALSE(asked.promised);
  REQUIRE(asked.gradients.size() == 2);
  CHECK(asked.gradients[0].what == remote_tensor::kind::undefined);
  CHECK(at::equal(asked.gradients[1].content, at::full({2}, 10.0)));
  REQUIRE(asked.wanted.size() == 1);
  CHECK(asked.wanted[0].argument == 1);
}

TEST_CASE("a parameter of another rank is asked for as a struct",
          "[runtime][caller][R14]") {
  lone_rank rank;
  auto& ex = rank.running();
  auto& parameters = *rank.rank_context::model()->parameters;
  ex.answer(parameter_reply{to_tensor_ref(at::full({3}, 6.0), true)});
  CHECK(at::equal(parameters.fetch(1), at::full({3}, 6.0)));
  auto asked = from_payload<parameter_request>(ex.sent.at(0).body, "request");
  CHECK(asked.head.what == request_kind::read_tensor);
  CHECK(asked.head.tensor == 1);
  CHECK(ex.sent[0].module == theirs);
  ex.answers.push_back({});
  parameters.store(1, at::full({3}, 8.0));
  asked = from_payload<parameter_request>(ex.sent.at(1).body, "request");
  CHECK(asked.head.what == request_kind::write_tensor);
  CHECK(at::equal(to_tensor(asked.value), at::full({3}, 8.0)));
}

TEST_CASE("a call whose results are known goes on with promises",
          "[runtime][caller][R38]") {
  lone_rank rank{true};
  auto& ex = rank.running();
  call_target target;
  target.tensors_only = true;
  auto reply = reply_with({at::full({2}, 3.0)});
  reply.result = value::tensor(0);
  ex.answer(reply);
  call_theirs({at::ones({2})}, target);
  auto got = call_theirs({at::ones({2})}, target);
  REQUIRE(ex.sent.size() == 2);
  CHECK(ex.sent[1].kind == call_kind::promise);
  auto asked = asked_of(ex.sent[1]);
  REQUIRE(asked.expected);
  CHECK((asked.expected->result == value::tensor(0)));
  REQUIRE(asked.expected->tensors.size() == 1);
  CHECK(asked.expected->tensors[0].meta.dtype
        == static_cast<uint8_t>(c10::kFloat));
  CHECK(asked.expected->tensors[0].meta.shape == std::vector<int64_t>{-1});
  CHECK(asked.expected->tensors[0].requires_grad);
  // Nobody took the first one.
  CHECK(asked.left == std::vector<uint32_t>{0});
  // What comes with the answer is what was asked for.
  call_reply answer;
  auto fails = GENERATE(false, true);
  answer.tensors = {fails ? remote_tensor::of(at::ones({2}), true)
                          : remote_tensor::held(at::ones({2}))};
  answer.reaches = {{}};
  ex.sent[1].answer->set_value({{}, to_payload(answer), {}});
  if (fails)
    CHECK_THAT(cause_of([&] { fence(ex); }),
               ContainsSubstring("result 0 comes unasked"));
  else
    CHECK_NOTHROW(fence(ex));
}

TEST_CASE(
  "what a call that waits returns comes where its caller took it before",
  "[runtime][caller][R38]") {
  lone_rank rank{true};
  auto& ex = rank.running();
  auto asks = [&](const call_reply& reply) {
    ex.answer(reply);
    return call_theirs({at::ones({2})});
  };
  // Nothing says that the kind returns tensors, so it always waits.
  asks(reply_with({at::zeros({2}), at::zeros({2})}));
  CHECK_FALSE(asked_of(ex.sent.back()).left);
  auto named = reply_with({at::full({2}, 1.0), at::full({2}, 2.0)});
  named.named = 2;
  {
    auto got = asks(named);
    CHECK(asked_of(ex.sent.back()).left == std::vector<uint32_t>{});
    CHECK(is_promise(got.tensors.tensor(0)));
    CHECK(at::equal(got.tensors.tensor(1), at::full({2}, 2.0)));
  }
  named.tensors[0] = remote_tensor::held(at::empty({3, 2}, at::kInt));
  auto got = asks(named);
  // It left the first one.
  CHECK(asked_of(ex.sent.back()).left == std::vector<uint32_t>{0});
  auto x = got.tensors.tensor(0);
  CHECK(is_promise(x));
  CHECK(x.scalar_type() == at::kInt);
  CHECK(x.sizes().vec() == std::vector<int64_t>{3, 2});
  // It goes on by its name.
  asks(named);
  named.named = 0;
  auto why = cause_of([&] { asks(named); });
  CHECK_THAT(why, ContainsSubstring("name of result 0 does not exist"));
}

TEST_CASE("an argument that is part of a parameter is copied when it is sent",
          "[runtime][caller][R13]") {
  lone_rank rank;
  auto& ex = rank.running();
  auto& weight = rank.model.mine->weight;
  ex.answer(reply_with({at::ones({1})}));
  auto own = at::full({2}, 2.0);
  call_theirs({weight.narrow(0, 0, 2), own});
  // Another microbatch, or the optimizer, while the message is on its way.
  weight.detach().fill_(7);
  own.fill_(7);
  auto asked = asked_of(ex.sent[0]);
  CHECK(at::equal(asked.tensors[0].content, at::full({2}, 2.0)));
  // Nobody else writes what a body made, so nobody copies it.
  CHECK(at::equal(asked.tensors[1].content, at::full({2}, 7.0)));
}

TEST_CASE("a gradient that nobody waits for is copied when it is sent",
          "[runtime][caller][R13][R38]") {
  lone_rank rank{true};
  auto& ex = rank.running();
  call_target target;
  target.tensors_only = true;
  auto reply = reply_with({at::full({2}, 3.0)});
  reply.result = value::tensor(0);
  ex.answer(reply);
  call_theirs({at::ones({2})}, target);
  auto y = call_theirs({at::ones({2})}, target).tensors.tensor(0);
  call_reply answer;
  answer.tensors = {remote_tensor::held(at::ones({2}))};
  answer.reaches = {{}};
  ex.sent.at(1).answer->set_value({{}, to_payload(answer), {}});
  fence(ex);
  auto gradient = at::full({2}, 10.0);
  {
    running_call::backward_scope running{ex};
    torch::autograd::Engine::get_default_engine().execute(
      {torch::autograd::impl::gradient_edge(y)}, {gradient}, false, false,
      true);
  }
  gradient.fill_(-1); // as this rank does when it adds another one
  REQUIRE(ex.sent.size() == 3);
  auto asked = from_payload<backward_request>(ex.sent[2].body, "request");
  REQUIRE(asked.gradients.size() == 1);
  CHECK(at::equal(asked.gradients[0].content, at::full({2}, 10.0)));
}

TEST_CASE("higher derivatives through another rank are refused by name",
          "[runtime][caller][R16]") {
  lone_rank rank;
  auto& ex = rank.running();
  auto backward_of = [&](const at::Tensor& y) {
    return cause_of([&] {
      running_call::backward_scope running{ex};
      torch::autograd::Engine::get_default_engine().execute(
        {torch::autograd::impl::gradient_edge(y)}, {at::ones_like(y)}, true,
        true, true);
    });
  };
  SECTION("of a call") {
    ex.answer(reply_with({at::full({2}, 3.0)}));
    auto x = at::ones({2}).set_requires_grad(true);
    auto y = call_theirs({x}).tensors.tensor(0);
    CHECK(backward_of(y)
          == "backward through 'theirs' of rank 1: create_graph (higher "
             "derivatives) is not supported");
    CHECK(ex.sent.size() == 1);
    CHECK_FALSE(x.grad().defined());
  }
  SECTION("of a parameter") {
    rank.rank_context::model()->parameters->replace(1);
    ex.answer(parameter_reply{to_tensor_ref(at::full({3}, 6.0), true)});
    auto y = rank.model.theirs->weight * 2;
    CHECK(backward_of(y)
          == "gradient of 'theirs.weight', which rank 1 owns: create_graph "
             "(higher derivatives) is not supported");
    CHECK(ex.sent.size() == 1);
  }
}
