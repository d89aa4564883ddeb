#pragma once

// What ranks say to each other (runtime/calls/messages.hpp), one of each.

#include "runtime/calls/messages.hpp"
#include "tests/support/actors/payloads.hpp"

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>

#include <functional>
#include <string>
#include <vector>

namespace smp::test {

inline object_id some_id() {
  return {rank_id{2}, ~uint64_t{0}, 8};
}

inline call_context some_context() {
  call_context result;
  result.grad = false;
  result.autocast = {{c10::kCPU, c10::kBFloat16}};
  return result;
}

/// An entry of each kind.
inline remote_tensors some_tensors() {
  return {remote_tensor::of(at::arange(6).view({2, 3}), true),
          remote_tensor::of(at::Tensor{}, false),
          remote_tensor::argument(3),
          remote_tensor::parameter(7, true),
          remote_tensor::needed(2, true),
          remote_tensor::of(some_id()),
          remote_tensor::held(at::empty({0, 4}, at::kInt).t()),
          remote_tensor::of(at::empty({0, 2}), false)};
}

inline value some_value() {
  return value::tuple(
    {value::tensor(0), value::of("text"),
     value::list({value::of(int64_t{5}), value::tensor(5)}, "List[Any]")});
}

inline forward_request some_call() {
  forward_request x;
  x.head = {request_kind::range, 2, 5, 0};
  x.context = some_context();
  x.training = false;
  x.invoker = 0x1234567890abcdef;
  x.name = "forward";
  x.numbers = {7, {{0x1234567890abcdef, 2}, {5, 1}}};
  x.arguments = some_value();
  x.tensors = some_tensors();
  x.left = {3, 0};
  return x;
}

inline forward_request some_promised_call() {
  auto x = some_call();
  x.left = {1};
  x.expected = prediction{value::tensor(0),
                          {remote_tensor::foretold(c10::kHalf, true, 2),
                           remote_tensor::foretold(c10::kLong, false, 0)}};
  return x;
}

inline call_reply some_reply() {
  call_reply x;
  x.result = some_value();
  x.changed = {{1, value::list({value::of(2.5)})}, {4, value::none()}};
  x.tensors = some_tensors();
  x.named = 4;
  x.written = {{0, 5}, {2, 4}};
  x.stateful = true;
  x.reaches = {{0, 2}, {}, {1}};
  return x;
}

inline backward_request some_backward() {
  backward_request x;
  x.context = some_context();
  x.origin = rank_id{3};
  x.call = 11;
  x.keep_graph = true;
  x.gradients = some_tensors();
  x.wanted = {{0, true}, {4, false}};
  x.promised = true;
  return x;
}

inline parameter_request about(request_kind what) {
  parameter_request x;
  x.head.what = what;
  x.head.tensor = 40;
  if (what != request_kind::read_tensor)
    x.value = make_tensor(8, 3);
  return x;
}

// -- whatever it is -----------------------------------------------------------

struct message_type {
  const char* name;
  payload sent;
  /// Reads a payload and writes it again.
  std::function<payload(const payload&)> again;
};

template <class T>
message_type type_of(const char* name, const T& x) {
  return {name, to_payload(x), [name](const payload& y) {
            return to_payload(from_payload<T>(y, name));
          }};
}

inline std::vector<message_type> all_messages() {
  object_message fetch = object_fetch{{5, 6}};
  object_message content = object_content{{5, 6}, make_tensor(24, 1)};
  object_message refusal = object_refusal{
    {5, 6}, {error_code::rank_down, rank_id{1}, "blocks.3", "is dead"}};
  object_message release = object_release{{{5, 6}, {7, 8}}};
  return {
    type_of("forward request", some_call()),
    type_of("promised forward request", some_promised_call()),
    type_of("reply", some_reply()),
    type_of("backward request", some_backward()),
    type_of("read of a parameter", about(request_kind::read_tensor)),
    type_of("write of a buffer", about(request_kind::write_tensor)),
    type_of("gradient of a parameter", about(request_kind::add_gradient)),
    type_of("value of a parameter", parameter_reply{make_tensor(8, 3)}),
    type_of("fetch", fetch),
    type_of("content", content),
    type_of("refusal", refusal),
    type_of("release", release),
    type_of("value of a step", step_value{some_value(), some_tensors()}),
  };
}

} // namespace smp::test
