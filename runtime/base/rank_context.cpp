#include "runtime/base/rank_context.hpp"

namespace smp {

namespace {

thread_local const rank_context* current_rank = nullptr;

} // namespace

const rank_context* rank_context::current() noexcept {
  return current_rank;
}

std::shared_ptr<model_context> rank_context::current_model() noexcept {
  return current_rank ? current_rank->model() : nullptr;
}

void rank_context::set_current(const rank_context* x) noexcept {
  current_rank = x;
}

} // namespace smp
