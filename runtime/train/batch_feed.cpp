#include "runtime/train/batch_feed.hpp"

#include <c10/util/Exception.h>

#include <utility>

namespace smp {

batch batch_feed::take(uint64_t step, bool last) {
  now_ = std::exchange(next_, std::nullopt);
  batch result;
  try {
    if (now_ && now_->step == step)
      result = now_->tensors.take();
    if (copies_ && !last)
      next_.emplace(
        ahead{step + 1, arriving_tensors{*copies_, make_(step + 1)}});
  } catch (const c10::Error&) {
    // Without them the step may have room; if the device has failed, the step
    // finds that and says so.
    copies_ = nullptr;
  }
  return result.empty() ? make_(step) : result;
}

} // namespace smp
