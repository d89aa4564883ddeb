#include "runtime/wire_ops.hpp"

#include "runtime/fault.hpp"
#include "runtime/tensor_bridge.hpp"

namespace smp {

void write_stream(byte_writer& out, execution& ex) {
  auto now = random_stream::of_default();
  if (!(now == ex.last_stream)) {
    ex.last_stream = now;
    ex.stream_is_initial = false;
  }
  out.boolean(!ex.stream_is_initial);
  if (!ex.stream_is_initial)
    now.write(out);
}

void read_stream(byte_reader& in, execution& ex) {
  if (!in.boolean("random stream"))
    return;
  ex.last_stream = random_stream::read(in);
  ex.stream_is_initial = false;
  if (SMP_FAULT("wrong-random-stream"))
    return;
  auto copy = ex.last_stream;
  copy.swap_with_default();
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
