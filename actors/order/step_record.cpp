#include "actors/order/step_record.hpp"

#include "actors/protocol/request_number.hpp"

#include <algorithm>

namespace smp {

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

const recorded_execution* step_record::find(request_id x) const {
  auto i = by_id.find(without_step(x));
  return i == by_id.end() ? nullptr : &executions[i->second];
}

} // namespace smp
