#include "partition/schedule/promised_order.hpp"

#include <algorithm>
#include <tuple>
#include <utility>

namespace smp {

namespace {

/// The chunk of each segment, indexed like `ready_key::segment`: backward
/// phases pass through them in reverse.
class segment_finder {
public:
  explicit segment_finder(std::vector<uint32_t> chunk_of)
    : chunk_of_(std::move(chunk_of)) {
    if (chunk_of_.empty())
      chunk_of_.push_back(0);
  }

  uint32_t operator()(const ready_key& k) const {
    auto last = chunk_of_.size() - 1;
    auto segment = std::min<uint64_t>(k.segment, last);
    return chunk_of_[k.what == phase::forward ? segment : last - segment];
  }

private:
  std::vector<uint32_t> chunk_of_;
};

} // namespace

pipeline_program promised_program(const pipeline_program& x) {
  auto takes_time = [](auto& y) { return y.forward > 0; };
  if (std::none_of(x.chain.begin(), x.chain.end(), takes_time))
    return x;
  auto result = x;
  result.chain.clear();
  for (auto& y : x.chain)
    if (takes_time(y) || y.ordered || y.waits || &y == &x.chain.back())
      result.chain.push_back(y);
  return result;
}

service_place promised_place_of(const pipeline_program& x, uint32_t device,
                                uint64_t microbatches) {
  auto result = place_of(x, device, microbatches);
  size_t segment = 0;
  for (auto& y : x.chain)
    if (y.device == device) {
      if (y.waits && y.forward == 0)
        result.chunk_of[segment] = turn_chunk;
      ++segment;
    }
  if (x.chain.size() > 1 && x.chain.back().device == device)
    result.chunk_of.back() = turn_chunk;
  return result;
}

service_order sequence_order(service_place x, uint64_t warm_up) {
  auto chunk_at = segment_finder{std::move(x.chunk_of)};
  auto position = [=](const ready_key& k) {
    auto found = chunk_at(k);
    if (found == turn_chunk)
      return std::tuple{uint64_t{0}, k.arrival};
    auto forward = k.what == phase::forward;
    uint64_t chunk = found;
    if (!forward)
      chunk = x.chunks - 1 - std::min<uint64_t>(chunk, x.chunks - 1);
    auto begin = k.microbatch.value / x.devices * x.devices;
    // The last group may be smaller.
    auto size = std::min<uint64_t>(x.devices,
                                   std::max(x.microbatches, begin + 1) - begin);
    auto rank = begin * x.chunks + chunk * size + (k.microbatch.value - begin);
    return std::tuple{1 + 2 * rank + (forward ? 0 : 2 * warm_up + 1),
                      k.arrival};
  };
  return [position](const ready_key& a, const ready_key& b) {
    return position(a) < position(b);
  };
}

service_order make_promised_order(std::string_view name, service_place x) {
  if (name == "1f1b" || name == "interleaved" || name == "interleaved_1f1b") {
    uint64_t behind = x.devices - x.device - 1; // devices
    auto warm_up = x.chunks == 1
                     ? behind
                     : 2 * behind + uint64_t{x.chunks - 1} * x.devices;
    return sequence_order(std::move(x), warm_up + 1);
  }
  auto chunk_at = segment_finder{std::move(x.chunk_of)};
  return [=](const ready_key& a, const ready_key& b) {
    auto first = [&](auto& k) { return chunk_at(k) == turn_chunk; };
    return first(a) != first(b) ? first(a) : backward_first(a, b);
  };
}

} // namespace smp
