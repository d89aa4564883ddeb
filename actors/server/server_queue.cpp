// What is ready to execute on a rank, and the token that it needs: a part of
// `server_core`.

#include "actors/server/server_core.hpp"

#include <exception>
#include <utility>

namespace smp {

// -- ready queue --------------------------------------------------------------

ready_key server_core::key_of(phase what, microbatch_id x) {
  ready_key result{what, x, ++arrivals_, 0};
  if (x.value < segments_.size()) // else there is no such microbatch
    result.segment = segments_[x.value][static_cast<size_t>(what)]++;
  return result;
}

void server_core::push(request x, std::vector<module_id> entered) {
  auto key = key_of(x.what, x.microbatch);
  ready_.push_back({key, std::move(entered), std::nullopt, std::move(x)});
}

void server_core::push(const pending_call& x, response y) {
  auto key = key_of(x.what, contexts_.at(x.context).current->microbatch);
  ready_.push_back({key, {}, x.context, std::move(y), !x.in_order});
  options_.board.answered(x.context);
}

void server_core::free_token(context_id ctx) {
  if (executing_ != ctx)
    return;
  executing_.reset();
  if (options_.launch_ahead > 0) {
    ++launched_;
    options_.board.device_works(num_launched());
  }
  // Released even if more is ready: other ranks of the process take turns.
  hold_ = hold::none;
  options_.token->release(seat_);
}

void server_core::pump() {
  serve_next();
  auto busy = executing_.has_value() || !ready_.empty();
  if (std::exchange(busy_, busy) != busy)
    output_.activity(busy);
}

void server_core::serve_next() {
  if (executing_ || !undecided_.empty() || waits_for_device())
    return;
  auto i = next_item();
  if (i == ready_.end()) {
    if (hold_ == hold::held) {
      hold_ = hold::none;
      options_.token->release(seat_);
    }
    return;
  }
  if (hold_ == hold::none)
    hold_ = options_.token->try_acquire(seat_) ? hold::held : hold::in_line;
  if (hold_ != hold::held)
    return;
  note_served(*i);
  auto item = std::move(*i);
  ready_.erase(i);
  auto ctx = item.context ? *item.context : idle_context();
  executing_ = ctx;
  options_.board.executes(ctx);
  auto& entry = contexts_[ctx];
  if (auto y = std::get_if<response>(&item.work))
    return hand_over(ctx, [&] { return entry.code->resume(std::move(*y)); });
  auto& x = std::get<request>(item.work);
  entry.current = request{x.id,   x.step, x.microbatch,  x.module,
                          x.what, {},     x.start_number};
  entry.current->promised = x.promised;
  entry.promises.clear();
  entry.entered = std::move(item.entered);
  if (!entry.code)
    entry.code = output_.make_context(ctx);
  hand_over(ctx, [&] { return entry.code->start(std::move(x)); });
}

// An executor that refuses its work disagrees with the core: a defect, as is an
// exception, whose text helps the caller that waits for the context.
template <class F>
void server_core::hand_over(context_id ctx, F f) {
  try {
    if (auto why = f())
      fail({error_code::internal,
            self(),
            {},
            "a message was refused: " + why.text});
  } catch (...) {
    output_.crashed(ctx, std::current_exception());
  }
}

context_id server_core::idle_context() {
  if (auto ctx = std::exchange(warm_, std::nullopt))
    if (auto i = contexts_.find(*ctx);
        i != contexts_.end() && !i->second.current)
      return *ctx;
  for (auto& [id, entry] : contexts_)
    if (!entry.current)
      return id;
  return context_id{++last_context_};
}

} // namespace smp
