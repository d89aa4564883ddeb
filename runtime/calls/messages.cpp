#include "runtime/calls/messages.hpp"

namespace smp {

// -- tensors ------------------------------------------------------------------

remote_tensor remote_tensor::held(const at::Tensor& x) {
  remote_tensor result;
  result.what = kind::held;
  result.requires_grad = x.requires_grad();
  result.meta.dtype = static_cast<uint8_t>(x.scalar_type());
  result.meta.device.type = static_cast<uint8_t>(x.device().type());
  result.meta.shape = x.sizes().vec();
  result.meta.strides = dense_strides(x);
  return result;
}

remote_tensor remote_tensor::foretold(at::ScalarType dtype, bool requires_grad,
                                      size_t dim, c10::DeviceType device) {
  remote_tensor result;
  result.what = kind::held;
  result.requires_grad = requires_grad;
  result.meta.dtype = static_cast<uint8_t>(dtype);
  result.meta.device.type = static_cast<uint8_t>(device);
  result.meta.shape.assign(dim, -1);
  return result;
}

// -- reading a part -----------------------------------------------------------

request_head read_head(const payload& x) {
  return byte_reader{x.bytes, "request"}.get<request_head>();
}

std::optional<held_object> answered_fetch(const payload& x) {
  try {
    byte_reader in{x.bytes};
    auto which = in.u8();
    if (which != object_message{object_content{}}.index()
        && which != object_message{object_refusal{}}.index())
      return std::nullopt;
    return in.get<held_object>();
  } catch (const error&) {
    return std::nullopt;
  }
}

} // namespace smp
