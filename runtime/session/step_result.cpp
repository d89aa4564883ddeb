#include "runtime/session/step_result.hpp"

#include "runtime/base/rank_context.hpp"
#include "runtime/lazy/placeholder.hpp"
#include "runtime/model/model_map.hpp"
#include "runtime/remote/object_store.hpp"
#include "runtime/remote/request_kind.hpp"

namespace smp {

struct step_result::entry {
  wire_tensor where;
  at::Tensor tensor; // once resolved
};

payload encode_result(const rank_context& rank, const packer& tensors,
                      const value& x, std::vector<object_id>& held) {
  payload result;
  wire_table table;
  auto& model = rank.model();
  auto ranks = rank.pipeline().size();
  for (auto& t : tensors.tensors()) {
    auto y = materialise(t).detach();
    auto snapshot = model && model->map->shares_state(y);
    if (ranks == 1 || y.nbytes() <= travelling_result_bytes) {
      table.push_back(put_data(result, y, snapshot));
      continue;
    }
    wire_tensor entry;
    entry.what = wire_tensor::kind::object;
    entry.object = rank.objects().hold(snapshot ? y.clone() : y,
                                       static_cast<uint32_t>(ranks));
    held.push_back(entry.object);
    table.push_back(entry);
  }
  byte_writer out;
  write(out, x);
  write(out, table);
  result.bytes = out.take();
  return result;
}

step_result::step_result(std::weak_ptr<const rank_context> rank, payload x)
  : rank_(std::move(rank)), payload_(std::move(x)) {
  byte_reader in{payload_.bytes};
  value_ = read_value(in);
  for (auto& where : read_table(in))
    entries_.push_back({where, {}});
  in.expect_end();
}

step_result::~step_result() {
  std::vector<object_id> ids;
  for (auto& x : entries_)
    if (x.where.what == wire_tensor::kind::object)
      ids.push_back(x.where.object);
  if (auto rank = ids.empty() ? nullptr : rank_.lock())
    rank->objects().release(std::move(ids));
}

std::vector<at::Tensor> step_result::resolve() {
  std::vector<at::Tensor> result;
  for (auto& x : entries_) {
    if (!x.tensor.defined() && x.where.what == wire_tensor::kind::data)
      x.tensor = take_data(payload_, x.where);
    if (!x.tensor.defined() && x.where.what == wire_tensor::kind::object) {
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
