#pragma once

// The tensors of a request or response: values, or references to something
// that the other side has or can get (R12, R14, R38).

#include "runtime/values/value_codec.hpp"
#include "transport/ids.hpp"

#include <cstdint>
#include <vector>

namespace smp {

/// One entry of the table; values of the message name entries by position.
struct wire_tensor {
  enum class kind : uint8_t {
    undefined, // a gradient that does not exist
    data,      // `index` in the tensors of the payload
    argument,  // response: it is the `index`-th argument tensor itself
    parameter, // `index` in the walk of the model; stays with its owner
    object,    // `object` in the object store of its owner
  };

  kind what = kind::undefined;
  uint32_t index = 0;
  object_id object;
  bool requires_grad = false;
};

using wire_table = std::vector<wire_tensor>;

inline void write(byte_writer& out, const wire_table& xs) {
  out.u32(static_cast<uint32_t>(xs.size()));
  for (auto& x : xs) {
    out.u8(static_cast<uint8_t>(x.what));
    out.boolean(x.requires_grad);
    if (x.what == wire_tensor::kind::object) {
      out.u64(x.object.owner.value);
      out.u64(x.object.number);
      out.u32(x.object.generation);
    } else {
      out.u32(x.index);
    }
  }
}

inline wire_table read_table(byte_reader& in) {
  wire_table result(in.count(6, "tensor table"));
  for (auto& x : result) {
    auto what = in.u8("tensor kind");
    if (what > static_cast<uint8_t>(wire_tensor::kind::object))
      in.fail("tensor kind", "unknown");
    x.what = static_cast<wire_tensor::kind>(what);
    x.requires_grad = in.boolean("requires_grad");
    if (x.what == wire_tensor::kind::object) {
      x.object.owner.value = in.u64("object owner");
      x.object.number = in.u64("object number");
      x.object.generation = in.u32("object generation");
    } else {
      x.index = in.u32("tensor index");
    }
  }
  return result;
}

} // namespace smp
