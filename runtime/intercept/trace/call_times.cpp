#include "runtime/intercept/trace/call_times.hpp"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>

namespace smp {

using c10::impl::VirtualGuardImpl;

size_t call_times::begin(std::optional<module_id> x) {
  auto at = now();
  calls_.push_back({x, current_, at, at, {}, {}});
  current_ = calls_.size() - 1;
  return *current_;
}

void call_times::start() {
  calls_.at(*current_).start = now();
}

void call_times::stop() {
  auto& x = calls_.at(*current_).stop;
  if (!x)
    x = now();
}

void call_times::end(size_t n) {
  auto& x = calls_.at(n);
  x.end = now();
  current_ = x.caller;
}

void call_times::resize(size_t n) {
  while (current_ && *current_ >= n)
    current_ = calls_[*current_].caller;
  calls_.resize(std::min(n, calls_.size()));
}

std::vector<double> call_times::seconds(size_t modules, size_t n) const {
  std::vector<double> result(modules);
  std::vector<double> inside(calls_.size()); // in what each call calls
  try {
    if (!where_.is_cpu()) {
      VirtualGuardImpl device{where_.type()};
      device.synchronizeStream(device.getStream(where_));
    }
    for (auto i = calls_.size(); i-- > n;) {
      auto& x = calls_[i];
      if (!x.end)
        continue;
      if (x.caller)
        inside[*x.caller] += between(x.begin, *x.end);
      auto own = between(x.start, x.stop.value_or(*x.end)) - inside[i];
      if (x.module)
        result.at(x.module->value) += std::max(own, 0.0);
    }
  } catch (const c10::AcceleratorError&) {
    std::ranges::fill(result, 0);
  }
  return result;
}

call_times::point call_times::now() const {
  point result{std::chrono::steady_clock::now(), nullptr};
  if (where_.is_cpu())
    return result;
  try {
    auto event = std::make_shared<c10::Event>(where_.type(),
                                              c10::EventFlag::BACKEND_DEFAULT);
    event->record(VirtualGuardImpl{where_.type()}.getStream(where_));
    result.device = std::move(event);
  } catch (const c10::AcceleratorError&) {
    // Whoever uses the device next meets the error.
  }
  return result;
}

double call_times::between(const point& a, const point& b) {
  if (a.device && b.device)
    return a.device->elapsedTime(*b.device) / 1000;
  return std::chrono::duration<double>(b.host - a.host).count();
}

} // namespace smp
