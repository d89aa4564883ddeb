#include "actors/order/step_record.hpp"

#include "actors/protocol/request_number.hpp"

#include <algorithm>

namespace smp {

namespace {

/// Sets the strides of axes of one element to 0, as they depend on timing:
/// autograd adds a gradient to another one in place, keeping its strides,
/// unless a message still holds that one; only these strides may then differ.
/// @returns nothing if the other strides are row-major
std::vector<int64_t> order_of_axes(const tensor_meta& x) {
  auto result = x.strides;
  auto row_major = true;
  int64_t next = 1;
  for (auto i = result.size(); i-- > 0;) {
    if (x.shape[i] == 1) {
      result[i] = 0;
      continue;
    }
    row_major = row_major && result[i] == next;
    next *= std::max<int64_t>(x.shape[i], 1);
  }
  if (row_major)
    result.clear();
  return result;
}

bool same_form(const tensor_meta& x, const tensor_meta& y) {
  return x.dtype == y.dtype && x.device == y.device && x.shape == y.shape
         && (x.strides == y.strides || order_of_axes(x) == order_of_axes(y));
}

std::string describe(const std::vector<int64_t>& xs) {
  std::string result = "[";
  for (auto n : xs)
    result += (result.size() > 1 ? ", " : "") + std::to_string(n);
  return result + "]";
}

std::string describe(const tensor_meta& x) {
  return describe(x.shape) + " of element type " + std::to_string(x.dtype)
         + (x.strides.empty() ? "" : " with strides " + describe(x.strides))
         + (x.device.type == 0 ? "" : " on a device");
}

} // namespace

message_form form_of(const payload& x) {
  return {x.bytes, {x.tensors.begin(), x.tensors.end()}};
}

std::optional<std::string> difference(const message_form& recorded,
                                      const payload& seen) {
  auto n = recorded.tensors.size();
  if (seen.tensors.size() != n)
    return std::to_string(seen.tensors.size()) + " tensors instead of "
           + std::to_string(n);
  for (size_t i = 0; i < n; ++i)
    if (!same_form(seen.tensors[i], recorded.tensors[i]))
      return "tensor " + std::to_string(i) + " is " + describe(seen.tensors[i])
             + " instead of " + describe(recorded.tensors[i]);
  if (seen.bytes != recorded.bytes)
    return "what is not a tensor (numbers, flags, structure) has another value";
  return std::nullopt;
}

bool same_place(const recorded_call& x, const call& y) {
  if (x.kind != y.kind || x.kind == call_kind::grant)
    return x.kind == y.kind;
  if (x.kind == call_kind::wait)
    return std::equal(x.until.begin(), x.until.end(), y.until.begin(),
                      y.until.end(), [](auto a, auto b) {
                        return a == without_step({{}, b}).number;
                      });
  return x.owner == y.owner && x.module == y.module && x.what == y.what;
}

bool same_call(const recorded_call& x, const call& y) {
  return same_place(x, y) && !difference(x.asked, y.body);
}

const recorded_execution* step_record::find(request_id x) const {
  auto i = by_id.find(without_step(x));
  return i == by_id.end() ? nullptr : &executions[i->second];
}

const recorded_call* step_record::find_call(uint32_t number) const {
  auto i = calls.find(number);
  return i == calls.end()
           ? nullptr
           : &executions[i->second.execution].calls[i->second.call];
}

} // namespace smp
