#include "runtime/verify/reference_numbers.hpp"

#include <ATen/SequenceNumber.h>
#include <torch/csrc/autograd/function.h>

#include <algorithm>

namespace smp {

void reference_numbers::start(uint64_t seed, call_observer* next) {
  finish();
  seed_ = seed;
  next_ = next;
  entries_.emplace_back().begin = at::sequence_number::peek();
  open_.push_back({&entries_.back(), random_stream{seed}});
  open_.back().before.swap_with_default();
}

void reference_numbers::finish() {
  while (!open_.empty()) {
    open_.back().before.swap_with_default();
    open_.pop_back();
  }
  entries_.clear();
}

// -- call_observer ------------------------------------------------------------

void reference_numbers::begin(const void* object,
                              std::span<const at::Tensor> arguments) {
  if (next_)
    next_->begin(object, arguments);
  auto name = names_.find(object);
  if (name == names_.end() || open_.empty())
    return;
  if (open_.back().what->object == object) {
    ++open_.back().again;
    return;
  }
  auto path = path_of_next(name->second);
  auto& x = entries_.emplace_back();
  x.object = object;
  x.path = path;
  x.begin = at::sequence_number::peek();
  open_.push_back({&x, random_stream::derived(call_seed(seed_, path)),
                   torch::autograd::get_current_node().get()});
  open_.back().before.swap_with_default();
}

void reference_numbers::end(const void* object,
                            std::span<const at::Tensor> results) {
  leave(object);
  if (next_)
    next_->end(object, results);
}

void reference_numbers::fail(const void* object) {
  leave(object);
  if (next_)
    next_->fail(object);
}

void reference_numbers::body_done(std::span<const at::Tensor> inputs,
                                  std::span<const at::Tensor> results) {
  if (next_)
    next_->body_done(inputs, results);
}

void reference_numbers::take_back() {
  // nop: one process does nothing twice
}

void reference_numbers::leave(const void* object) {
  if (open_.empty() || open_.back().what->object != object)
    return;
  auto& x = open_.back();
  if (x.again > 0) {
    --x.again;
    return;
  }
  x.before.swap_with_default();
  x.what->end = at::sequence_number::peek();
  open_.pop_back();
}

// -- numbers of calls ---------------------------------------------------------

uint64_t reference_numbers::path_of_next(const std::string& module) {
  auto node = torch::autograd::get_current_node();
  if (node && open_.back().node != node.get())
    return path_of_repeat(module, node->sequence_nr());
  auto& from = *open_.back().what;
  from.made.emplace_back(module, at::sequence_number::peek());
  return path_of_call(from.path, path_of_module(module), from.counts[module]++);
}

/// A call that backward repeats, as with checkpointing, gets the number of the
/// original: the calls made after the node are repeated in order.
uint64_t reference_numbers::path_of_repeat(const std::string& module,
                                           uint64_t made_at) {
  auto from = std::find_if(entries_.rbegin(), entries_.rend(), [&](auto& x) {
    return x.begin <= made_at && (x.end == 0 || made_at < x.end);
  });
  if (from == entries_.rend()) // made before the microbatch
    from = std::prev(entries_.rend());
  auto skip = from->repeats[{made_at, module}]++;
  uint32_t number = 0;
  for (auto& [name, at] : from->made) {
    if (name != module)
      continue;
    if (at > made_at && skip-- == 0)
      break;
    ++number;
  }
  return path_of_call(from->path, path_of_module(module), number);
}

} // namespace smp
