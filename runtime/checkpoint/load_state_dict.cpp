#include "runtime/checkpoint/load_state_dict.hpp"

#include "runtime/checkpoint/weight_files.hpp"
#include "runtime/checkpoint/weight_names.hpp"
#include "runtime/collectives/agreement.hpp"
#include "runtime/session/distributed_optimizer.hpp"
#include "runtime/session/rank_runtime.hpp"
#include "runtime/session/state_check.hpp"
#include "runtime/step/model_state.hpp"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <memory>
#include <set>
#include <string>
#include <vector>

namespace smp {

namespace {

/// Files from which a model gets its tensors.
class state_files {
public:
  /// @param prefix see `names_in_model`
  state_files(const std::string& path, const model_map& map,
              const std::string& prefix)
    : path_(path), files_(path) {
    std::set<std::string> known;
    for (auto& x : map.model().tensors)
      known.insert(x.names.begin(), x.names.end());
    names_ = names_in_model(files_.tensors(), known, prefix, path);
  }

  /// @throws error (config) if their tensors are not those of the model
  state_check check(const model_state& model) const {
    state_check result{model.map()};
    for (size_t k = 0; k < names_.size(); ++k)
      if (!names_[k].empty())
        result.add(names_[k], files_.tensors()[k].shape);
    result.finish("cannot load " + path_);
    return result;
  }

  /// Reads what this rank owns.
  void load(const model_state& model,
            const std::vector<distributed_optimizer*>& optimizers) const {
    auto checked = check(model);
    at::NoGradGuard no_grad;
    model.await_updates();
    auto& map = model.map();
    for (size_t k = 0; k < names_.size(); ++k) {
      if (names_[k].empty())
        continue;
      if (auto i = checked.position(names_[k]); map.owned(i)) {
        auto& x = map.model().tensors[i].tensor;
        copy(k, 0, x, map.slice(i));
        for (auto* optimizer : optimizers)
          load_master(k, x, map.slice(i), *optimizer);
      }
    }
  }

private:
  /// The files may have more digits than the parameter.
  void load_master(size_t k, const at::Tensor& parameter,
                   const tensor_slice* slice,
                   distributed_optimizer& optimizer) const {
    auto part = optimizer.part_of(parameter, slice);
    if (!part || !part->is_master)
      return;
    copy(k, part->where ? part->where->begin : 0, part->values, slice);
    optimizer.load_master(*part, part->values); // for the parameter's value
  }

  /// @param k index of the tensor in the files
  /// @param first the row of this rank's part at which `to` begins
  /// @param slice what this rank holds of it; null: the whole
  void copy(size_t k, int64_t first, const at::Tensor& to,
            const tensor_slice* slice) const {
    if (to.dim() == 0) {
      to.copy_(files_.read(k));
    } else if (!slice || slice->dim > 0) {
      copy_rows(k, first, to, slice);
    } else {
      const auto last = first + to.size(0);
      int64_t done = 0; // rows that this rank holds of earlier ranges
      for (auto& range : slice->ranges()) {
        auto from = std::max(first, done);
        auto end = std::min(last, done + range.length);
        if (from < end)
          copy_rows(k, range.begin + from - done,
                    to.narrow(0, from - first, end - from), nullptr);
        done += range.length;
      }
    }
  }

  /// Reads some rows at a time, as a rank may hold only a part of each.
  /// @param slice along another axis; null: the whole of each row
  void copy_rows(size_t k, int64_t first, const at::Tensor& to,
                 const tensor_slice* slice) const {
    constexpr int64_t most_bytes = 1 << 20;
    auto& x = files_.tensors()[k];
    auto bytes = static_cast<int64_t>(c10::elementSize(x.dtype));
    for (size_t i = 1; i < x.shape.size(); ++i)
      bytes *= x.shape[i];
    const auto most = std::max<int64_t>(
      most_bytes / std::max<int64_t>(bytes, 1), 1);
    for (int64_t i = 0; i < to.size(0); i += most) {
      auto n = std::min(most, to.size(0) - i);
      auto rows = files_.read_rows(k, first + i, n);
      to.narrow(0, i, n).copy_(slice ? slice->of(rows) : rows);
    }
  }

  std::string path_;
  weight_files files_;
  std::vector<std::string> names_; // in the model, by tensor of the files
};

} // namespace

void load_state_dict(const std::string& path, distributed_model_base& model,
                     const std::vector<distributed_optimizer*>& optimizers,
                     const std::string& prefix) {
  auto& rank = session::current().internals();
  std::shared_ptr<const state_files> files;
  do_together(rank, "smp.load.check", [&] {
    files = std::make_shared<const state_files>(path, model.state().map(),
                                                prefix);
    files->check(model.state());
  });
  model.register_post_partition_hook([files, &model, optimizers] {
    do_together(session::current().internals(), "smp.load",
                [&] { files->load(model.state(), optimizers); });
  });
}

void check_state_dict(const std::string& path,
                      const distributed_model_base& model,
                      const std::string& prefix) {
  state_files{path, model.state().map(), prefix}.check(model.state());
}

} // namespace smp
