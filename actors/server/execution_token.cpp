#include "actors/server/execution_token.hpp"

#include <algorithm>
#include <utility>

namespace smp {

execution_token::seat execution_token::enroll(std::function<void()> granted) {
  auto f = std::make_shared<const std::function<void()>>(std::move(granted));
  std::lock_guard guard{mutex_};
  seats_.emplace(++last_, std::move(f));
  return last_;
}

bool execution_token::try_acquire(seat x) {
  std::lock_guard guard{mutex_};
  if (!owner_) {
    owner_ = x;
    return true;
  }
  line_.push_back(x);
  return false;
}

void execution_token::release(seat x) {
  callback_ptr next;
  {
    std::lock_guard guard{mutex_};
    if (owner_ != x)
      return;
    next = pass_on();
  }
  if (next)
    (*next)();
}

void execution_token::leave(seat x) {
  callback_ptr next;
  {
    std::lock_guard guard{mutex_};
    seats_.erase(x);
    std::erase(line_, x);
    if (owner_ == x)
      next = pass_on();
  }
  if (next)
    (*next)();
}

execution_token::callback_ptr execution_token::pass_on() {
  owner_.reset();
  if (line_.empty())
    return nullptr;
  owner_ = line_.front();
  line_.pop_front();
  return seats_.at(*owner_);
}

} // namespace smp
