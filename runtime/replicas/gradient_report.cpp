#include "runtime/replicas/gradient_report.hpp"

#include <algorithm>
#include <iterator>
#include <utility>

namespace smp {

namespace {

void merge_into(std::vector<uint32_t>& xs, const std::vector<uint32_t>& ys) {
  std::vector<uint32_t> all;
  std::set_union(xs.begin(), xs.end(), ys.begin(), ys.end(),
                 std::back_inserter(all));
  xs = std::move(all);
}

void take_most(std::vector<uint32_t>& xs, const std::vector<uint32_t>& ys) {
  xs.resize(std::max(xs.size(), ys.size()));
  for (size_t i = 0; i < ys.size(); ++i)
    xs[i] = std::max(xs[i], ys[i]);
}

} // namespace

void gradient_report::merge(const gradient_report& x) {
  merge_into(changed, x.changed);
  merge_into(sparse, x.sparse);
  merge_into(late, x.late);
  trained = trained || x.trained;
  take_most(begun, x.begun);
  take_most(rounds, x.rounds);
}

} // namespace smp
