#include "tests/support/catch.hpp"

#include "runtime/values/tensor_bridge.hpp"
#include "tests/support/error_of.hpp"
#include "tests/support/torch/lone_rank.hpp"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/variable.h>

#include <memory>
#include <string>

// Parameters and buffers that another rank owns (R14): what this rank asks for,
// and what it does with the values.

using namespace smp;
using namespace smp::test;

namespace {

struct weighted : torch::nn::Module {
  weighted()
    : weight(register_parameter("weight", at::full({3}, 2.0))),
      mean(register_buffer("mean", at::full({3}, 4.0))) {
    // nop
  }

  at::Tensor weight, mean;
};

/// Rank 1 owns the whole model; the test answers for it.
struct model_of_others {
  model_of_others() {
    map.place({rank_id{1}});
    map.finish_partition();
  }

  scripted_execution& ex() {
    return rank.running();
  }

  /// The owner answers a read.
  void answer(double x) {
    ex().answer(parameter_reply{to_tensor_ref(at::full({3}, x), true)});
  }

  /// It takes a new value.
  void accept() {
    ex().answers.push_back({});
  }

  parameter_request asked(size_t i) {
    return from_payload<parameter_request>(ex().sent.at(i).body, "request");
  }

  uint32_t position(const at::Tensor& x) const {
    return parameters.position(x);
  }

  lone_rank rank;
  std::shared_ptr<weighted> model = std::make_shared<weighted>();
  model_map map{rank_id{0}, 2, walk(*model)};
  remote_parameters parameters{rank, map,
                               *rank.rank_context::model()->promises};
  uint32_t weight = position(model->weight), mean = position(model->mean);
};

bool is_full(const at::Tensor& x, double y) {
  return at::equal(x, at::full({3}, y));
}

} // namespace

TEST_CASE("a parameter is fetched once per step, a buffer each time",
          "[runtime][parameters][R14]") {
  model_of_others x;
  x.answer(6);
  CHECK(is_full(x.parameters.fetch(x.weight), 6));
  CHECK(is_full(x.parameters.fetch(x.weight), 6));
  CHECK(x.ex().sent.size() == 1);
  CHECK(x.ex().sent[0].owner == rank_id{1});
  CHECK(x.ex().sent[0].what == phase::forward);
  CHECK(x.asked(0).head.what == request_kind::read_tensor);
  CHECK(x.asked(0).head.tensor == x.weight);
  CHECK_FALSE(x.ex().met_state());
  for (auto content : {7.0, 8.0}) {
    x.answer(content);
    CHECK(is_full(x.parameters.fetch(x.mean), content));
  }
  CHECK(x.ex().sent.size() == 3);
  CHECK(x.ex().met_state());
  x.parameters.end_step();
  x.answer(9);
  CHECK(is_full(x.parameters.fetch(x.weight), 9));
  CHECK(x.ex().sent.size() == 4);
}

TEST_CASE("all who want a parameter hear why it did not come",
          "[runtime][parameters][R14]") {
  model_of_others x;
  for (int i = 0; i < 2; ++i)
    CHECK(cause_of([&] { x.parameters.fetch(x.weight); })
          == "the test has no answer");
  CHECK(x.ex().sent.size() == 1);
}

TEST_CASE("a new value of a buffer goes to its owner, once",
          "[runtime][parameters][R14][R52]") {
  model_of_others x;
  {
    running_call::pass_scope scope{x.ex(), {recompute_pass::kind::first, 0}, 1};
    x.accept();
    x.parameters.store(x.mean, at::full({3}, 5.0));
  }
  REQUIRE(x.ex().sent.size() == 1);
  auto asked = x.asked(0);
  CHECK(asked.head.what == request_kind::write_tensor);
  CHECK(asked.head.tensor == x.mean);
  CHECK(is_full(to_tensor(asked.value), 5));
  CHECK(x.ex().met_state());
  // As it is computed again, in backward.
  running_call::pass_scope scope{x.ex(), {recompute_pass::kind::again, 0}, 1};
  x.parameters.store(x.mean, at::full({3}, 5.0));
  CHECK(x.ex().sent.size() == 1);
}

TEST_CASE("what a view changes in the copy of a buffer goes to its owner",
          "[runtime][parameters][R14]") {
  model_of_others x;
  x.answer(6);
  auto copy = x.parameters.fetch(x.mean);
  auto view = copy.narrow(0, 0, 2);
  x.parameters.lend(x.mean, copy);
  x.parameters.flush();
  CHECK(x.ex().sent.size() == 1); // nothing changed
  for (auto content : {7.0, 8.0}) {
    view.fill_(content);
    auto before = x.ex().sent.size();
    x.accept();
    x.parameters.flush();
    x.parameters.flush(); // the owner has it
    REQUIRE(x.ex().sent.size() == before + 1);
    auto asked = x.asked(before);
    CHECK(asked.head.what == request_kind::write_tensor);
    auto expected = at::full({3}, 6.0);
    expected.narrow(0, 0, 2).fill_(content);
    CHECK(at::equal(to_tensor(asked.value), expected));
  }
  // Nobody can write into it any more.
  view.reset();
  x.parameters.flush();
  copy.fill_(9);
  x.parameters.flush();
  CHECK(x.ex().sent.size() == 3);
}

TEST_CASE("a changed copy of a parameter is refused by name",
          "[runtime][parameters][R14]") {
  model_of_others x;
  x.answer(6);
  auto copy = x.parameters.fetch(x.weight);
  CHECK_NOTHROW(x.parameters.flush());
  copy.detach().add_(1);
  CHECK(cause_of([&] { x.parameters.flush(); }, error_code::unsupported)
        == "changes a view of 'weight', which rank 1 owns; change it inside "
           "the module that owns it");
}

TEST_CASE("what cannot be done with what another rank owns is refused by name",
          "[runtime][parameters][R14]") {
  model_of_others x;
  auto why = [](auto&& f) { return cause_of(f, error_code::unsupported); };
  CHECK(why([&] { x.parameters.refuse_write(x.weight, "aten::add_"); })
        == "in-place aten::add_ changes 'weight', which rank 1 owns; change it "
           "inside the module that owns it");
  CHECK(why([&] { x.parameters.position(at::ones({3})); })
        == "`.data` of a parameter that another rank owns, or a tensor of "
           "another model, is used: read the parameter itself");
  running_call::set_current(nullptr);
  CHECK(why([&] { x.parameters.fetch(x.mean); })
        == "'mean' is used outside a step, but rank 1 owns it; use "
           "model.state_dict()");
  CHECK_NOTHROW(x.parameters.flush());
  CHECK(x.ex().sent.empty());
}

TEST_CASE("the gradient of a parameter goes to its owner",
          "[runtime][parameters][R14]") {
  lone_rank rank;
  auto& ex = rank.running();
  auto weight = rank.model.theirs->weight;
  rank.rank_context::model()->parameters->replace(1);
  ex.answer(parameter_reply{to_tensor_ref(at::full({3}, 6.0), true)});
  auto y = weight * 2;
  CHECK(is_full(y.detach(), 12));
  auto run_backward = [&] {
    torch::autograd::Engine::get_default_engine().execute(
      {torch::autograd::impl::gradient_edge(y)}, {at::full({3}, 10.0)}, false,
      false, true);
  };
  SECTION("in the step") {
    ex.answers.push_back({});
    {
      running_call::backward_scope running{ex};
      run_backward();
    }
    REQUIRE(ex.sent.size() == 2);
    CHECK(ex.sent[1].owner == rank_id{1});
    CHECK(ex.sent[1].what == phase::backward);
    auto asked = from_payload<parameter_request>(ex.sent[1].body, "request");
    CHECK(asked.head.what == request_kind::add_gradient);
    CHECK(asked.head.tensor == 1);
    CHECK(is_full(to_tensor(asked.value), 20));
    CHECK_FALSE(weight.grad().defined());
  }
  SECTION("and nowhere else") {
    CHECK(cause_of(run_backward, error_code::unsupported)
          == "gradient of 'theirs.weight', which rank 1 owns: call "
             "model.backward(loss) inside the step");
    CHECK(ex.sent.size() == 1);
  }
}
