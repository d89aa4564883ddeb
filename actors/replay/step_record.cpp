#include "actors/replay/step_record.hpp"

#include "actors/protocol/request_number.hpp"

namespace smp {

namespace {

tensor_form form_of(const tensor_ref& x) {
  return {x.dtype, x.device, x.shape};
}

std::string describe(const tensor_form& x) {
  std::string result = "[";
  for (auto n : x.shape)
    result += (result.size() > 1 ? ", " : "") + std::to_string(n);
  return result + "] of element type " + std::to_string(x.dtype)
         + (x.device.type == 0 ? "" : " on a device");
}

} // namespace

message_form form_of(const payload& x) {
  message_form result{x.bytes, {}};
  for (auto& t : x.tensors)
    result.tensors.push_back(form_of(t));
  return result;
}

std::optional<std::string> difference(const message_form& recorded,
                                      const payload& seen) {
  auto n = recorded.tensors.size();
  if (seen.tensors.size() != n)
    return std::to_string(seen.tensors.size()) + " tensors instead of "
           + std::to_string(n);
  for (size_t i = 0; i < n; ++i)
    if (auto x = form_of(seen.tensors[i]); x != recorded.tensors[i])
      return "tensor " + std::to_string(i) + " is " + describe(x)
             + " instead of " + describe(recorded.tensors[i]);
  if (seen.bytes != recorded.bytes)
    return "what is no tensor (numbers, flags, structure) has another value";
  return std::nullopt;
}

const recorded_execution* step_record::find(request_id x) const {
  auto i = by_id.find(without_step(x));
  return i == by_id.end() ? nullptr : &executions[i->second];
}

} // namespace smp
