#include "runtime/session/step_result.hpp"

#include "runtime/session/engine.hpp"
#include "runtime/session/model_state.hpp"
#include "runtime/lazy/placeholder.hpp"
#include "runtime/remote/request_kind.hpp"

namespace smp {

struct step_result::entry {
  wire_tensor where;
  at::Tensor tensor; // once resolved
};

payload encode_result(engine& eng, const packer& tensors, const value& x) {
  payload result;
  wire_table table;
  auto& st = eng.model();
  for (auto& t : tensors.tensors()) {
    auto y = materialise(t).detach();
    auto snapshot = st && st->shares_state(y);
    if (eng.pipeline().size() == 1 || y.nbytes() <= travelling_result_bytes) {
      table.push_back(put_data(result, y, snapshot));
      continue;
    }
    wire_tensor held;
    held.what = wire_tensor::kind::object;
    held.object = eng.objects().hold(
      snapshot ? y.clone() : y, static_cast<uint32_t>(eng.pipeline().size()));
    eng.note_held_result(held.object);
    table.push_back(held);
  }
  byte_writer out;
  write(out, x);
  write(out, table);
  result.bytes = out.take();
  return result;
}

step_result::step_result(std::weak_ptr<engine> eng, payload x)
  : engine_(std::move(eng)), payload_(std::move(x)) {
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
  if (auto eng = ids.empty() ? nullptr : engine_.lock())
    eng->objects().release(std::move(ids));
}

std::vector<at::Tensor> step_result::resolve() {
  std::vector<at::Tensor> result;
  for (auto& x : entries_) {
    if (!x.tensor.defined() && x.where.what == wire_tensor::kind::data)
      x.tensor = take_data(payload_, x.where);
    if (!x.tensor.defined() && x.where.what == wire_tensor::kind::object) {
      auto eng = engine_.lock();
      if (!eng)
        throw error{error_code::unsupported,
                    "the result of a step is read after its session ended"};
      x.tensor = eng->objects().fetch(x.where.object);
    }
    result.push_back(x.tensor);
  }
  return result;
}

} // namespace smp
