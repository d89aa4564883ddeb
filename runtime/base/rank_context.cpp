#include "runtime/base/rank_context.hpp"

#include "runtime/base/here.hpp"

namespace smp {

const rank_context* rank_context::current() noexcept {
  return here::of_thread().rank;
}

c10::Device rank_context::current_device() noexcept {
  return here::of_thread().device;
}

std::shared_ptr<model_context> rank_context::current_model() noexcept {
  auto* rank = current();
  return rank ? rank->model() : nullptr;
}

void rank_context::set_current(const rank_context* x) noexcept {
  auto& here = here::of_thread();
  here.rank = x;
  here.device = x ? x->device() : c10::Device{c10::kCPU};
}

} // namespace smp
