#include "runtime/checkpoint/saved_model.hpp"

#include "runtime/session/rank_runtime.hpp"
#include "runtime/session/model_state.hpp"
#include "runtime/checkpoint/safetensors.hpp"
#include "runtime/remote/request_kind.hpp"

#include <vector>

namespace smp {

namespace {

constexpr const char* wanted_name = "smp.save.wanted";
constexpr const char* tensor_name = "smp.save.tensor";
constexpr uint32_t no_more = ~uint32_t{0};

payload message(uint32_t position) {
  byte_writer out;
  out.u32(position);
  return {out.take(), {}};
}

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
    return st_.partitioned() ? st_.map().tensor_owner(i) : rank_.pipeline().front();
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
    byte_writer out;
    for (uint32_t i = 0; i < tensors.size(); ++i)
      out.boolean(!tensors[i].is_attribute && owned(i) && mine(i).defined());
    std::vector<bool> found(tensors.size());
    for (auto& x : rank_.exchange().all_gather(rank_.pipeline(), "smp.save",
                                              {out.take(), {}})) {
      byte_reader in{x.bytes};
      for (size_t i = 0; i < found.size(); ++i)
        found[i] = in.boolean("tensor to save") || found[i];
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
      outlines.push_back({t.names.front(), t.tensor.scalar_type(),
                          t.tensor.sizes().vec()});
    }
    write_safetensors(path, outlines,
                      [&](size_t k) { return value(positions[k]); },
                      {{"format", "pt"}});
  }

  at::Tensor value(uint32_t i) {
    if (owned(i))
      return mine(i);
    rank_.exchange().send(owner(i), wanted_name, message(i));
    return take_data(rank_.exchange().receive(owner(i), tensor_name),
                     wire_tensor{});
  }

  void dismiss() {
    for (auto rank : rank_.pipeline())
      if (rank != rank_.self())
        rank_.exchange().send(rank, wanted_name, message(no_more));
  }

  // -- the others -------------------------------------------------------------

  void serve() {
    auto writer = rank_.pipeline().front();
    while (true) {
      auto x = rank_.exchange().receive(writer, wanted_name);
      auto i = byte_reader{x.bytes}.u32("position of a tensor");
      if (i == no_more)
        return;
      payload answer;
      put_data(answer, mine(i), false); // it is there before `no_more` comes
      rank_.exchange().send(writer, tensor_name, std::move(answer));
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
