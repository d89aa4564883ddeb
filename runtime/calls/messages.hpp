#pragma once

// The messages about modules and tensors that pipeline ranks exchange, as
// structs. Each struct has one `inspect`, which both writes and reads it
// (transport/bytes.hpp): `to_payload(x)` and `from_payload<T>(body, what)`.

#include "runtime/base/call_context.hpp"
#include "runtime/calls/request_kind.hpp"
#include "runtime/execution/call_streams.hpp"
#include "runtime/execution/recompute_pass.hpp"
#include "runtime/values/tensor_bridge.hpp"
#include "runtime/values/value_codec.hpp"
#include "transport/bytes.hpp"

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

namespace smp {

// -- tensors ------------------------------------------------------------------

/// A tensor in a message: a value, or a reference to one that the receiver has
/// or can get (R12, R14, R38). Value trees refer to it by position.
struct remote_tensor {
  enum class kind : uint8_t {
    undefined, // a gradient that is absent
    data,      // `content`
    argument,  // in a reply: the `index`-th argument tensor itself
    parameter, // `index` in the walk of the model; stays with its owner
    object,    // in the result of a step: `object` in its owner's store
    needed,    // the `index`-th of the results that the request needs
    held,      // `meta`; the content stays at the owner, who has it by name
  };

  kind what = kind::undefined;
  bool requires_grad = false;
  at::Tensor content = {};
  /// Copy the bytes when this is written, see `to_tensor_ref`.
  bool snapshot = false;
  uint32_t index = 0;
  object_id object = {};
  /// held; data, once it was read
  tensor_meta meta = {};

  /// Makes an entry that carries `x`; of kind undefined if `x` is undefined.
  static remote_tensor of(at::Tensor x, bool snapshot) {
    if (!x.defined())
      return {};
    auto grad = x.requires_grad();
    return {kind::data, grad, std::move(x), snapshot};
  }

  static remote_tensor of(object_id x) {
    return {.what = kind::object, .object = x};
  }

  static remote_tensor argument(uint32_t index) {
    return {.what = kind::argument, .index = index};
  }

  static remote_tensor parameter(uint32_t index, bool requires_grad = false) {
    return {kind::parameter, requires_grad, {}, false, index};
  }

  static remote_tensor needed(uint32_t index, bool requires_grad) {
    return {kind::needed, requires_grad, {}, false, index};
  }

  /// Carries only dtype, sizes and strides of `x`; receivers fetch it by name.
  static remote_tensor held(const at::Tensor& x);

  /// A result of which only this is known before the call has run.
  static remote_tensor foretold(at::ScalarType dtype, bool requires_grad,
                                size_t dim, c10::DeviceType device = c10::kCPU);

  /// True unless the receiver already has the tensor.
  bool travels() const noexcept {
    return what == kind::data || what == kind::needed || what == kind::held;
  }
};

constexpr remote_tensor::kind last_of(remote_tensor::kind) noexcept {
  return remote_tensor::kind::held;
}

template <class Inspector>
bool inspect(Inspector& f, tensor_meta& x) {
  return f.object(x).fields(
    f.field(
      "dtype", [&x] { return x.dtype; },
      [&x](uint8_t y) {
        x.dtype = y;
        return y < c10::NumScalarTypes;
      }),
    f.field("device", x.device.type),
    f.field(
      "sizes", [&x]() -> const auto& { return x.shape; },
      [&x](std::vector<int64_t> y) {
        x.shape = std::move(y);
        return std::none_of(x.shape.begin(), x.shape.end(),
                            [](auto n) { return n < -1; });
      }),
    strides_field(f, x));
}

template <class Inspector>
bool inspect(Inspector& f, remote_tensor& x) {
  auto object = f.object(x);
  if (!object.fields(f.field("kind", x.what),
                     f.field("requires_grad", x.requires_grad)))
    return false;
  switch (x.what) {
    case remote_tensor::kind::undefined:
      return true;
    case remote_tensor::kind::data:
      return object.fields(f.field(
        "data", [&x] { return to_tensor_ref(x.content, x.snapshot); },
        [&x](const tensor_ref& y) {
          x.content = to_tensor(y);
          x.meta = y;
          return true;
        }));
    case remote_tensor::kind::argument:
    case remote_tensor::kind::parameter:
    case remote_tensor::kind::needed:
      return object.fields(f.field("index", x.index));
    case remote_tensor::kind::object:
      return object.fields(f.field("object", x.object));
    case remote_tensor::kind::held:
      return object.fields(f.field("meta", x.meta));
  }
  return false;
}

using remote_tensors = std::vector<remote_tensor>;

/// Per output: the positions of the arguments that its gradient reaches.
using reached_positions = std::vector<std::vector<uint32_t>>;

// -- requests -----------------------------------------------------------------

/// The prefix of every request; enough to tell which modules it enters.
struct request_head {
  request_kind what = request_kind::call;
  /// range and method_range: children [first, last) of a Sequential (R8).
  uint32_t first = 0;
  uint32_t last = 0;
  /// read_tensor, write_tensor, add_gradient: position in the walk.
  uint32_t tensor = 0;
};

template <class Inspector>
bool inspect(Inspector& f, request_head& x) {
  auto object = f.object(x);
  if (!object.fields(f.field("kind of work", x.what)))
    return false;
  switch (x.what) {
    case request_kind::range:
    case request_kind::method_range:
      return object.fields(f.field("first child", x.first),
                           f.field("last child", x.last));
    case request_kind::read_tensor:
    case request_kind::add_gradient:
    case request_kind::write_tensor:
      return object.fields(f.field("tensor", x.tensor));
    default:
      return true;
  }
}

/// @throws error (protocol)
request_head read_head(const payload& x);

// -- calls --------------------------------------------------------------------

/// What a call will return, as far as earlier calls of its kind told (R38).
struct prediction {
  /// Has nothing but tensors, and what is the same for all calls of a kind.
  value result;
  /// See `remote_tensor::foretold`.
  remote_tensors tensors;
};

template <class Inspector>
bool inspect(Inspector& f, prediction& x) {
  return f.object(x).fields(f.field("result", x.result),
                            f.field("tensors", x.tensors));
}

/// Runs a module, or consecutive children of a Sequential.
struct forward_request {
  request_head head;
  call_context context;
  bool training = true;
  uint64_t invoker = 0;
  /// TorchScript modules: name of the method or attribute.
  std::string name;
  /// For random numbers (R23): the path of the call, without counts; for a
  /// range, the call site of its children.
  call_streams::origin numbers;
  recompute_pass pass;
  /// A tuple; refers to `tensors` by position.
  value arguments;
  remote_tensors tensors;
  /// The owner keeps the results by name, as the caller may pass them on so;
  /// the reply carries the contents of all except those at these positions.
  std::optional<std::vector<uint32_t>> left;
  /// The results with which the caller goes on; absent: it waits.
  std::optional<prediction> expected;
};

template <class Inspector>
bool inspect(Inspector& f, forward_request& x) {
  return f.object(x).fields(
    f.field("head", x.head), f.field("context", x.context),
    f.field("training", x.training), f.field("invoker", x.invoker),
    f.field("name", x.name), f.field("numbers", x.numbers),
    f.field("pass", x.pass), f.field("arguments", x.arguments),
    f.field("tensors", x.tensors), f.field("left", x.left),
    f.field("expected", x.expected));
}

/// The reply to every call, forward and backward, whether its caller waits or
/// went on: then it tells what the caller did not know.
struct call_reply {
  /// A tensor argument that the module wrote into (R12).
  struct written_argument {
    uint32_t argument = 0;
    uint32_t content = 0; // in `tensors`
  };

  /// Names `tensors` by position. Absent if the caller foresaw it.
  value result;
  /// Changed non-tensor arguments: position and new content.
  std::vector<std::pair<uint32_t, value>> changed;
  /// Results, or gradients by `backward_request::wanted`.
  remote_tensors tensors;
  /// The number of `tensors` that their owner also serves by name.
  uint32_t named = 0;
  std::vector<written_argument> written;
  /// The call read or changed state that other calls may change.
  bool stateful = false;
  /// Empty if no caller continues before a backward completes.
  reached_positions reaches;
};

template <class Inspector>
bool inspect(Inspector& f, call_reply::written_argument& x) {
  return f.object(x).fields(f.field("argument", x.argument),
                            f.field("content", x.content));
}

template <class Inspector>
bool inspect(Inspector& f, call_reply& x) {
  return f.object(x).fields(
    f.field("result", x.result), f.field("changed", x.changed),
    f.field("tensors", x.tensors), f.field("named", x.named),
    f.field("written", x.written), f.field("stateful", x.stateful),
    f.field("reaches", x.reaches));
}

// -- backward -----------------------------------------------------------------

/// Runs the backward of a call.
struct backward_request {
  struct wanted_gradient {
    uint32_t argument = 0;
    bool push = false; // else it stays at the owner by name
  };

  request_head head{request_kind::backward};
  call_context context;
  /// The call: the rank that made it, and its number in the step.
  rank_id origin;
  uint32_t call = 0;
  bool keep_graph = false;
  /// By output of the call.
  remote_tensors gradients;
  std::vector<wanted_gradient> wanted;
  /// The caller does not wait: it goes on with each gradient that it wants.
  bool promised = false;
};

template <class Inspector>
bool inspect(Inspector& f, backward_request::wanted_gradient& x) {
  return f.object(x).fields(f.field("argument", x.argument),
                            f.field("push", x.push));
}

template <class Inspector>
bool inspect(Inspector& f, backward_request& x) {
  return f.object(x).fields(
    f.field("head", x.head), f.field("context", x.context),
    f.field("origin", x.origin), f.field("call", x.call),
    f.field("keep_graph", x.keep_graph), f.field("gradients", x.gradients),
    f.field("wanted", x.wanted), f.field("promised", x.promised));
}

// -- parameters and buffers ---------------------------------------------------

/// Reads or writes a tensor of the receiver, or adds to its gradient (R14).
struct parameter_request {
  request_head head{request_kind::read_tensor};
  /// Absent in a read.
  tensor_ref value;
};

template <class Inspector>
bool inspect(Inspector& f, parameter_request& x) {
  auto object = f.object(x);
  return object.fields(f.field("head", x.head))
         && (x.head.what == request_kind::read_tensor
             || object.fields(f.field("value", x.value)));
}

/// Answers a read.
struct parameter_reply {
  tensor_ref value;
};

template <class Inspector>
bool inspect(Inspector& f, parameter_reply& x) {
  return f.object(x).fields(f.field("value", x.value));
}

// -- objects ------------------------------------------------------------------
// A fetch or a release goes to the owner of the object, and the fetched content
// comes from it; so ids travel without the owner, and a rank cannot name an
// object of a third rank.

struct held_object {
  uint64_t number = 0;
  uint32_t generation = 0;

  object_id of(rank_id owner) const noexcept {
    return {owner, number, generation};
  }
};

inline held_object without_owner(object_id x) noexcept {
  return {x.number, x.generation};
}

template <class Inspector>
bool inspect(Inspector& f, held_object& x) {
  return f.object(x).fields(f.field("number", x.number),
                            f.field("generation", x.generation));
}

struct object_fetch {
  held_object id;
};

template <class Inspector>
bool inspect(Inspector& f, object_fetch& x) {
  return f.object(x).fields(f.field("id", x.id));
}

struct object_content {
  held_object id;
  tensor_ref content;
};

template <class Inspector>
bool inspect(Inspector& f, object_content& x) {
  return f.object(x).fields(f.field("id", x.id), f.field("content", x.content));
}

/// Answers the fetch of an object that the owner does not hold.
struct object_refusal {
  held_object id;
  failure why;
};

template <class Inspector>
bool inspect(Inspector& f, object_refusal& x) {
  auto get = [&x]() -> const failure& { return x.why; };
  auto set = [&x](failure y) {
    x.why = std::move(y);
    return static_cast<bool>(x.why);
  };
  return f.object(x).fields(f.field("id", x.id), f.field("why", get, set));
}

struct object_release {
  std::vector<held_object> ids;
};

template <class Inspector>
bool inspect(Inspector& f, object_release& x) {
  return f.object(x).fields(f.field("ids", x.ids));
}

using object_message = std::variant<object_fetch, object_content,
                                    object_refusal, object_release>;

/// @returns the fetch that a malformed message was meant to answer, if it can
/// be read.
std::optional<held_object> answered_fetch(const payload& x);

// -- steps --------------------------------------------------------------------

/// The result of the step body of a microbatch.
struct step_value {
  /// Names `tensors` by position.
  value result;
  remote_tensors tensors;
  /// How often the optimizers of pp_rank 0 were called before.
  uint64_t updates = 0;
};

template <class Inspector>
bool inspect(Inspector& f, step_value& x) {
  return f.object(x).fields(f.field("result", x.result),
                            f.field("tensors", x.tensors),
                            f.field("updates", x.updates));
}

} // namespace smp
