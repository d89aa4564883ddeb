#include "runtime/step/step_result.hpp"

#include "actors/protocol/result_name.hpp"
#include "runtime/base/rank_context.hpp"
#include "runtime/calls/messages.hpp"
#include "runtime/calls/object_store.hpp"
#include "runtime/execution/running_call.hpp"
#include "runtime/lazy/placeholder.hpp"
#include "runtime/model/model_map.hpp"

namespace smp {

struct step_result::entry {
  remote_tensor where;
  at::Tensor tensor; // once resolved
};

payload encode_result(const running_call& ex, const packer& tensors,
                      const value& x) {
  auto& rank = ex.rank();
  step_value result{x, {}, rank.counters().updates};
  auto& model = rank.model();
  auto ranks = rank.pipeline().size();
  for (auto& t : tensors.tensors()) {
    auto y = materialise(t).detach();
    auto snapshot = model && model->map->shares_state(y);
    if (ranks == 1 || y.nbytes() <= travelling_result_bytes) {
      result.tensors.push_back(remote_tensor::of(y, snapshot));
      continue;
    }
    auto id = step_result_name(rank.self(), ex.step(), ex.microbatch(),
                               result.tensors.size());
    rank.objects().hold(id, snapshot ? y.clone() : y,
                        static_cast<uint32_t>(ranks));
    result.tensors.push_back(remote_tensor::of(id));
  }
  return to_payload(result);
}

std::vector<at::Tensor> materialised(const packer& tensors) {
  std::vector<at::Tensor> result;
  for (auto& t : tensors.tensors())
    result.push_back(materialise(t));
  return result;
}

step_result::step_result(std::weak_ptr<const rank_context> rank,
                         const payload& x, std::vector<at::Tensor> own)
  : rank_(std::move(rank)) {
  auto found = from_payload<step_value>(x, "result of a step");
  value_ = std::move(found.result);
  updates_ = found.updates;
  for (auto& where : found.tensors)
    entries_.push_back({std::move(where), {}});
  for (size_t i = 0; i < own.size(); ++i)
    entries_[i].tensor = std::move(own[i]);
}

step_result::~step_result() {
  std::vector<object_id> ids;
  for (auto& x : entries_)
    if (x.where.what == remote_tensor::kind::object)
      ids.push_back(x.where.object);
  if (auto rank = ids.empty() ? nullptr : rank_.lock())
    rank->objects().release(std::move(ids));
}

std::vector<at::Tensor> step_result::resolve() {
  std::vector<at::Tensor> result;
  for (auto& x : entries_) {
    if (!x.tensor.defined() && x.where.what == remote_tensor::kind::data)
      x.tensor = x.where.content;
    if (!x.tensor.defined() && x.where.what == remote_tensor::kind::object) {
      auto rank = rank_.lock();
      if (!rank)
        throw error{error_code::unsupported,
                    "the result of a step is read after its session ended"};
      x.tensor = rank->objects().fetch(x.where.object);
    }
    result.push_back(x.tensor);
  }
  return result;
}

} // namespace smp
