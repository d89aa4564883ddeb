#include "runtime/checkpoint/saved_model.hpp"

#include "runtime/checkpoint/safetensors.hpp"
#include "runtime/session/model_state.hpp"
#include "runtime/session/rank_runtime.hpp"
#include "runtime/values/tensor_bridge.hpp"
#include "transport/bytes.hpp"

#include <vector>

namespace smp {

namespace {

constexpr const char* wanted_name = "smp.save.wanted";
constexpr const char* tensor_name = "smp.save.tensor";
constexpr uint32_t no_more = ~uint32_t{0};

/// One file, as one rank sees it being written.
class save {
public:
  save(const distributed_model_base& model, bool gradients)
    : st_(model.state()),
      rank_(session::current().internals()),
      gradients_(gradients) {
    // nop
  }

  void run(const std::string& path) {
    auto positions = choose();
    if (rank_.pp_rank() > 0) {
      serve();
      return;
    }
    try {
      write(path, positions);
    } catch (...) {
      dismiss();
      throw;
    }
    dismiss();
  }

private:
  rank_id owner(uint32_t i) const {
    return st_.partitioned() ? st_.map().tensor_owner(i)
                             : rank_.pipeline().front();
  }

  bool owned(uint32_t i) const {
    return owner(i) == rank_.self();
  }

  at::Tensor mine(uint32_t i) const {
    auto& x = st_.model().tensors[i].tensor;
    return gradients_ ? x.grad() : x.detach();
  }

  /// @returns positions of tensors that have a value; only owners know whether
  /// there is a gradient
  std::vector<uint32_t> choose() const {
    auto& tensors = st_.model().tensors;
    std::vector<bool> found(tensors.size());
    for (uint32_t i = 0; i < tensors.size(); ++i)
      found[i] = !tensors[i].is_attribute && owned(i) && mine(i).defined();
    for (auto& x : rank_.exchange().all_gather(rank_.pipeline(), "smp.save",
                                               to_payload(found))) {
      auto theirs = from_payload<std::vector<bool>>(x, "tensors to save");
      for (size_t i = 0; i < found.size(); ++i)
        found[i] = found[i] || theirs.at(i);
    }
    std::vector<uint32_t> result;
    for (uint32_t i = 0; i < found.size(); ++i)
      if (found[i])
        result.push_back(i);
    return result;
  }

  // -- pp_rank 0 --------------------------------------------------------------

  void write(const std::string& path, const std::vector<uint32_t>& positions) {
    std::vector<tensor_outline> outlines;
    for (auto i : positions) {
      auto& t = st_.model().tensors[i];
      outlines.push_back(
        {t.names.front(), t.tensor.scalar_type(), t.tensor.sizes().vec()});
    }
    write_safetensors(path, outlines,
                      [&](size_t k) { return value(positions[k]); },
                      {{"format", "pt"}});
  }

  at::Tensor value(uint32_t i) {
    if (owned(i))
      return mine(i);
    rank_.exchange().send(owner(i), wanted_name, to_payload(i));
    return to_tensor(from_payload<tensor_ref>(
      rank_.exchange().receive(owner(i), tensor_name), "saved tensor"));
  }

  void dismiss() {
    for (auto rank : rank_.pipeline())
      if (rank != rank_.self())
        rank_.exchange().send(rank, wanted_name, to_payload(no_more));
  }

  // -- the others -------------------------------------------------------------

  void serve() {
    auto writer = rank_.pipeline().front();
    while (true) {
      auto x = rank_.exchange().receive(writer, wanted_name);
      auto i = from_payload<uint32_t>(x, "position of a tensor");
      if (i == no_more)
        return;
      // It is there before `no_more` comes.
      rank_.exchange().send(writer, tensor_name,
                            to_payload(to_tensor_ref(mine(i), false)));
    }
  }

  const model_state& st_;
  const rank_context& rank_;
  bool gradients_;
};

} // namespace

void save_state(const std::string& path, const distributed_model_base& model) {
  save{model, false}.run(path);
}

void save_gradients(const std::string& path,
                    const distributed_model_base& model) {
  save{model, true}.run(path);
}

} // namespace smp
