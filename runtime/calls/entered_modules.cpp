#include "runtime/calls/entered_modules.hpp"

#include "runtime/calls/messages.hpp"
#include "runtime/model/model_map.hpp"

namespace smp {

std::vector<module_id> entered_modules(const model_map& map, const request& x) {
  auto& order = map.order();
  std::vector<module_id> result;
  auto add = [&](uint32_t i) {
    if (order.ordered(i))
      result.push_back(module_id{i});
  };
  if (order.entries().empty() || x.what != phase::forward)
    return result;
  auto module = static_cast<uint32_t>(x.module.value);
  if (x.body.bytes.empty()) {
    add(module); // the step body
    return result;
  }
  try {
    auto head = read_head(x.body);
    switch (head.what) {
      case request_kind::call:
      case request_kind::method:
      case request_kind::get_attribute:
      case request_kind::set_attribute:
        add(module);
        break;
      case request_kind::range:
      case request_kind::method_range: {
        auto& children = map.model().modules.at(module).children;
        for (auto i = head.first; i < head.last && i < children.size(); ++i)
          add(children[i]);
        break;
      }
      case request_kind::read_tensor:
      case request_kind::write_tensor:
        for (auto y : order.guards(head.tensor))
          add(static_cast<uint32_t>(y.value));
        break;
      default:
        break;
    }
  } catch (const std::exception&) {
    // The code that serves the request reports the error.
    result.clear();
  }
  return result;
}

} // namespace smp
