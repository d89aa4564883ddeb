#include "runtime/lazy/late_value.hpp"

#include "runtime/deferred/boxed_arguments.hpp"

#include <c10/core/TensorImpl.h>

#include <mutex>
#include <unordered_map>
#include <utility>

namespace smp {

namespace {

struct late_tensors {
  std::mutex mutex;
  std::unordered_map<const c10::TensorImpl*, std::function<void()>> arrive;
};

late_tensors& all_late() {
  static auto& result = *new late_tensors; // outlives all tensors
  return result;
}

} // namespace

void make_late(const at::Tensor& x, std::function<void()> arrive) {
  auto* impl = x.unsafeGetTensorImpl();
  std::unique_lock guard{all_late().mutex};
  all_late().arrive[impl] = std::move(arrive);
  impl->*key_access::key_set() = impl->key_set().add(absent_key);
}

bool is_late(const at::Tensor& x) {
  if (!is_absent(x))
    return false;
  std::unique_lock guard{all_late().mutex};
  return all_late().arrive.contains(x.unsafeGetTensorImpl());
}

void await_late(const at::Tensor& x) {
  if (!is_absent(x))
    return;
  std::function<void()> arrive;
  {
    std::unique_lock guard{all_late().mutex};
    auto i = all_late().arrive.find(x.unsafeGetTensorImpl());
    if (i == all_late().arrive.end())
      return;
    arrive = i->second;
  }
  // Waits without the lock: another microbatch may access `x` meanwhile.
  arrive();
  forget_late(x);
}

void forget_late(const at::Tensor& x) {
  auto* impl = x.unsafeGetTensorImpl();
  std::unique_lock guard{all_late().mutex};
  if (all_late().arrive.erase(impl) > 0)
    impl->*key_access::key_set() = impl->key_set().remove(absent_key);
}

} // namespace smp
