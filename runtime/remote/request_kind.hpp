#pragma once

// What stands first in the body of a request: which kind of work it is, and
// what else every kind shares.

#include "runtime/remote/execution.hpp"
#include "runtime/remote/tensor_table.hpp"
#include "runtime/values/value_codec.hpp"

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <span>

namespace smp {

enum class request_kind : uint8_t {
  call,         // forward of one module
  range,        // forward of consecutive children of a Sequential (R8)
  backward,     // backward of a call or range
  read_tensor,  // the value of a parameter or buffer (R14)
  add_gradient, // a gradient of a parameter (R14)
  write_tensor, // a new value of a buffer
  // Of a TorchScript module (runtime/intercept/script/script_calls.hpp):
  method,        // one method
  method_range,  // consecutive children of a Sequential (R8)
  get_attribute, // the value of an attribute that may change
  set_attribute,
  add, // of two tensors, of no module
};

/// The last of them, for whoever reads one.
inline constexpr auto last_request_kind = request_kind::add;

/// Where the results of a call stay.
enum class wire_results : uint8_t {
  push, // they come with the response
  hold, // they stay in the owner's object store, the response has their ids
  promise, // the same; the request has the ids and says what it expects
};

// The bytes of a message must be the same in every step of a flow that does not
// change: a replayed step does not send them again (R33). What differs between
// steps all the same travels among the tensors.

/// Appends `x` to the tensors of a message, and its position to the bytes.
void put_varying(byte_writer& out, payload& body, byte_writer x);

/// @returns what `put_varying` took; a view into `body`.
/// @throws error (protocol) if the message has no such tensor
std::span<const std::byte> take_varying(byte_reader& in, const payload& body);

/// Appends a random stream, or that there is none.
void put_stream(byte_writer& out, payload& body, const random_stream* x);

/// Appends the random stream unless the receiver can derive it (R23).
void write_stream(byte_writer& out, payload& body, execution& ex);

/// Takes over a stream that came along. @returns whether one did
bool read_stream(byte_reader& in, const payload& body, execution& ex);

/// Appends an entry for `x` to the table and, where its bytes travel, to the
/// tensors of the message.
/// @param snapshot copy the bytes, see `to_tensor_ref`
wire_tensor put_data(payload& out, const at::Tensor& x, bool snapshot);

/// @returns the tensor of an entry of kind data.
/// @throws error (protocol) if the message has no such tensor
at::Tensor take_data(const payload& in, const wire_tensor& x);

} // namespace smp
