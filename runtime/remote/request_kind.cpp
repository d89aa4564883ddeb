#include "runtime/remote/request_kind.hpp"

#include "runtime/values/tensor_bridge.hpp"

namespace smp {

void put_varying(byte_writer& out, payload& body, byte_writer x) {
  auto bytes = std::make_shared<const std::vector<std::byte>>(x.take());
  out.u32(static_cast<uint32_t>(body.tensors.size()));
  tensor_ref t;
  t.data = bytes->data();
  t.nbytes = bytes->size();
  t.dtype = static_cast<uint8_t>(at::kByte);
  t.shape = {static_cast<int64_t>(bytes->size())};
  t.owner = std::move(bytes);
  body.tensors.push_back(std::move(t));
}

std::span<const std::byte> take_varying(byte_reader& in, const payload& body) {
  auto index = in.u32("position of bytes");
  if (index >= body.tensors.size()
      || body.tensors[index].device != device_ref{})
    in.fail("position of bytes", "no such tensor in host memory");
  auto& t = body.tensors[index];
  return {static_cast<const std::byte*>(t.data), t.nbytes};
}

void put_stream(byte_writer& out, payload& body, const random_stream* x) {
  out.boolean(x != nullptr);
  if (x == nullptr)
    return;
  byte_writer bytes;
  x->write(bytes);
  put_varying(out, body, std::move(bytes));
}

void write_stream(byte_writer& out, payload& body, execution& ex) {
  auto now = ex.stream_to_send();
  put_stream(out, body, now ? &*now : nullptr);
}

bool read_stream(byte_reader& in, const payload& body, execution& ex) {
  if (!in.boolean("random stream"))
    return false;
  byte_reader bytes{take_varying(in, body)};
  auto stream = random_stream::read(bytes);
  bytes.expect_end();
  ex.take_stream(std::move(stream));
  return true;
}

wire_tensor put_data(payload& out, const at::Tensor& x, bool snapshot) {
  wire_tensor result;
  if (!x.defined())
    return result;
  result.what = wire_tensor::kind::data;
  result.index = static_cast<uint32_t>(out.tensors.size());
  result.requires_grad = x.requires_grad();
  out.tensors.push_back(to_tensor_ref(x, snapshot));
  return result;
}

at::Tensor take_data(const payload& in, const wire_tensor& x) {
  if (x.index >= in.tensors.size())
    throw error{error_code::protocol,
                "tensor " + std::to_string(x.index) + " of a message with "
                  + std::to_string(in.tensors.size()) + " tensors"};
  return to_tensor(in.tensors[x.index]);
}

} // namespace smp
