#include "partition/partition_stability.hpp"

#include <algorithm>
#include <map>
#include <string>

namespace smp {

size_t undecided_modules(const model_info& model, const partition_plan& plan,
                         double error) {
  size_t result = 0;
  for (auto first : {error, -error}) {
    auto other = model;
    std::map<std::string, double> factors; // by kind, alternately more and less
    for (auto& x : other) {
      auto change = factors.size() % 2 == 0 ? first : -first;
      auto factor = factors.emplace(x.type, 1 + change).first->second;
      if (x.compute)
        *x.compute *= factor;
    }
    auto devices = make_partition(other, plan.options).module_device;
    size_t moved = 0;
    for (size_t i = 0; i < devices.size(); ++i)
      moved += devices[i] != plan.module_device[i];
    result = std::max(result, moved);
  }
  return result;
}

} // namespace smp
