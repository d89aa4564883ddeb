#include "runtime/checkpoint/saved_model.hpp"

#include "partition/rank_layout.hpp"
#include "runtime/checkpoint/safetensors.hpp"
#include "runtime/session/rank_runtime.hpp"
#include "runtime/step/model_state.hpp"
#include "runtime/values/tensor_bridge.hpp"
#include "transport/bytes.hpp"

#include <ATen/ops/zeros_like.h>

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
    // All replicas hold the same values; peers hold shared tensors jointly.
    if (rank_.layout().rank(comm_group::rdp, rank_.self()) > 0)
      return;
    auto positions = choose();
    if (rank_.layout().rank(comm_group::tp, rank_.self()) > 0) {
      serve(peers().front());
      return;
    }
    if (rank_.pp_rank() > 0) {
      serve(rank_.pipeline().front());
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
    return gradients_ ? st_.gradient(i)
                      : st_.model().tensors[i].tensor.detach();
  }

  at::ScalarType type_of(uint32_t i) const {
    auto type = st_.model().tensors[i].tensor.scalar_type();
    return gradients_ && st_.loss_scale().value() != 1
             ? c10::promoteTypes(type, at::kFloat)
             : type;
  }

  /// An empty slice never gets a gradient.
  at::Tensor mine_or_zeros(uint32_t i) const {
    auto x = mine(i);
    return x.defined()
             ? x
             : at::zeros_like(st_.model().tensors[i].tensor, type_of(i));
  }

  /// The ranks that share tensors with this one, which is one of them.
  std::vector<rank_id> peers() const {
    return rank_.layout().members(comm_group::tp, rank_.self());
  }

  bool is_first_peer() const {
    return peers().front() == rank_.self();
  }

  /// @returns on the first peer the merged slices, on others their own slice.
  at::Tensor whole(uint32_t i) {
    auto* slice = st_.map().slice(i);
    if (!slice || !is_first_peer())
      return mine_or_zeros(i);
    std::vector<at::Tensor> parts{mine_or_zeros(i)};
    for (auto rank : peers())
      if (rank != rank_.self())
        parts.push_back(ask(rank, i));
    return slice->merged(parts);
  }

  at::Tensor ask(rank_id owner, uint32_t i) {
    rank_.exchange().send(owner, wanted_name, to_payload(i));
    return to_tensor(from_payload<tensor_ref>(
      rank_.exchange().receive(owner, tensor_name), "saved tensor"));
  }

  /// @returns positions of tensors that have a value; only owners know whether
  /// a tensor has a gradient
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
      outlines.push_back({t.names.front(), type_of(i), sizes_of(i)});
    }
    write_safetensors(path, outlines,
                      [&](size_t k) { return value(positions[k]); },
                      {{"format", "pt"}});
  }

  std::vector<int64_t> sizes_of(uint32_t i) const {
    auto* slice = st_.map().slice(i);
    return slice ? slice->whole : st_.model().tensors[i].tensor.sizes().vec();
  }

  at::Tensor value(uint32_t i) {
    return owned(i) ? whole(i) : ask(owner(i), i);
  }

  void dismiss() {
    dismiss(rank_.pipeline());
    dismiss(peers());
  }

  void dismiss(const std::vector<rank_id>& ranks) {
    for (auto rank : ranks)
      if (rank != rank_.self())
        rank_.exchange().send(rank, wanted_name, to_payload(no_more));
  }

  // -- the others -------------------------------------------------------------

  /// @param client the writer or, for slices, the first peer
  void serve(rank_id client) {
    while (true) {
      auto x = rank_.exchange().receive(client, wanted_name);
      auto i = from_payload<uint32_t>(x, "position of a tensor");
      if (i == no_more)
        break;
      // The client asks one at a time: `no_more` comes after this reply.
      rank_.exchange().send(client, tensor_name,
                            to_payload(to_tensor_ref(whole(i), false)));
    }
    if (is_first_peer())
      dismiss(peers());
  }

  const model_state& st_;
  const rank_context& rank_;
  bool gradients_;
};

} // namespace

void save_state(const std::string& path, const distributed_model_base& model) {
  model.state().await_updates();
  save{model, false}.run(path);
}

void save_gradients(const std::string& path,
                    const distributed_model_base& model) {
  save{model, true}.run(path);
}

} // namespace smp
