#pragma once

// A rank by itself: what it would send to others, the test takes as structs,
// and it answers in their place.

#include "actors/order/order_book.hpp"
#include "actors/server/executor.hpp"
#include "actors/server/microbatch_sequencer.hpp"
#include "runtime/base/rank_context.hpp"
#include "runtime/calls/callee.hpp"
#include "runtime/calls/caller.hpp"
#include "runtime/calls/messages.hpp"
#include "runtime/calls/module_runner.hpp"
#include "runtime/calls/object_store.hpp"
#include "runtime/calls/parameters.hpp"
#include "runtime/calls/promised_call.hpp"
#include "runtime/execution/running_call.hpp"
#include "runtime/execution/saved_calls.hpp"
#include "runtime/model/model_map.hpp"
#include "transport/loopback/loopback_fabric.hpp"

#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>

#include <deque>
#include <functional>
#include <memory>
#include <stdexcept>
#include <utility>
#include <vector>

namespace smp::test {

/// Module 1 ("mine") is rank 0's, module 2 ("theirs") rank 1's. Each has a
/// weight (tensors 0 and 1).
struct shared_model : torch::nn::Module {
  struct part : torch::nn::Module {
    part() : weight(register_parameter("weight", torch::full({3}, 2.0))) {
      // nop
    }
    at::Tensor weight;
  };

  shared_model()
    : mine(register_module("mine", std::make_shared<part>())),
      theirs(register_module("theirs", std::make_shared<part>())) {
    // nop
  }

  std::shared_ptr<part> mine;
  std::shared_ptr<part> theirs;
};

/// What an execution asked of other ranks, with the answers of the test.
class scripted_execution final : public executor, public running_call {
public:
  explicit scripted_execution(const rank_context& rank)
    : running_call(rank, *this) {
    // nop
  }

  using running_call::id;

  void start(const request& x) {
    begin(x, 0);
  }

  response park(call x) override {
    sent.push_back(std::move(x));
    if (answers.empty())
      throw error{error_code::internal, "the test has no answer"};
    auto result = std::move(answers.front());
    answers.pop_front();
    result.id = {rank().self(), sent.size()};
    return result;
  }

  void send(call x) override {
    sent.push_back(std::move(x));
  }

  template <class T>
  void answer(const T& x) {
    answers.push_back({{}, to_payload(x), {}});
  }

  std::vector<call> sent;
  std::deque<response> answers;

private:
  void wake() override {
    // nop
  }
};

/// Rank 0 of two, in step 1, microbatch 0.
class lone_rank final : public rank_context, private module_runner {
public:
  /// Runs instead of a module.
  using code = std::function<value(unpacker&, const std::vector<value>&,
                                   packer&)>;

  explicit lone_rank(bool promises = false)
    : network_(2, {1, true, true}),
      map_(rank_id{0}, 2, walk(model)),
      records_store_(order_book::options{}),
      objects_store_(network_.at(rank_id{0})),
      promises_(promises, records_store_),
      parameters_(*this, map_, promises_),
      execution_(*this) {
    self_ = rank_id{0};
    pipeline_ = {rank_id{0}, rank_id{1}};
    objects_ = &objects_store_;
    calls_ = &calls_store_;
    records_ = &records_store_;
    sequencer_ = &sequencer_store_;
    counters_.step = 1;
    model_ = std::make_shared<model_context>();
    model_->map = &map_;
    model_->changes = &changes_;
    model_->placeholders = &parameters_;
    model_->parameters = &parameters_;
    model_->promises = &promises_;
    model_->modules = this;
    map_.place({rank_id{0}, rank_id{0}, rank_id{1}});
    map_.finish_partition();
    execution_.start(asking(payload{}));
    rank_context::set_current(this);
    running_call::set_current(&execution_);
  }

  ~lone_rank() {
    running_call::set_current(nullptr);
    rank_context::set_current(nullptr);
  }

  /// @returns a request of rank 1 for the module `mine`.
  request asking(payload body, uint64_t number = 5) const {
    request result;
    result.id = {rank_id{1}, number};
    result.step = step_id{1};
    result.module = module_id{1};
    result.body = std::move(body);
    return result;
  }

  template <class T>
  payload serve(const T& x, uint64_t number = 5) {
    return smp::serve(execution_, asking(to_payload(x), number));
  }

  scripted_execution& running() {
    return execution_;
  }

  void set_code(code x) {
    code_ = std::move(x);
  }

private:
  std::shared_ptr<shared_model> owned_model_ = std::make_shared<shared_model>();

public:
  shared_model& model = *owned_model_;
  /// What the last call wanted to run.
  call_target wanted;

private:
  invocation run(module_id, const call_target& x, unpacker& in,
                 const std::vector<value>& args, packer& out) override {
    wanted = x;
    return {code_(in, args, out), {}};
  }

  call_result call(module_id, const call_target&, const packer&,
                   const std::vector<value>&) override {
    throw std::logic_error{"this rank calls itself"};
  }

  loopback_network network_;
  model_map map_;
  map_changes changes_{map_};
  order_book records_store_;
  object_store objects_store_;
  saved_calls calls_store_;
  microbatch_sequencer sequencer_store_;
  promise_book promises_;
  remote_parameters parameters_;
  scripted_execution execution_;
  code code_;
};

} // namespace smp::test
