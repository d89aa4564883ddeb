#pragma once

#include "runtime/checkpoint/manifest.hpp"
#include "runtime/checkpoint/safetensors.hpp"
#include "runtime/session/distributed_model.hpp"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

namespace smp {

class distributed_optimizer;
class rank_context;
struct tensor_box;
struct tensor_slice;
struct walked_tensor;

/// Loads a checkpoint into a session, in steps: all errors are found before
/// anything is changed, and values load once the owners of tensors are known.
/// All of its functions are collective over the world and throw the same error
/// on all ranks.
class checkpoint_loader {
public:
  /// @param path see `resume_from_checkpoint`
  /// @returns null if there is none
  /// @throws error (config) naming the manifest
  static std::shared_ptr<checkpoint_loader> find(const std::string& path);

  /// @param text of the manifest
  checkpoint_loader(std::string folder, const std::string& text);

  const std::string& folder() const noexcept {
    return folder_;
  }

  const checkpoint_manifest& manifest() const noexcept {
    return manifest_;
  }

  /// Compares the manifest with the model and its optimizers, and every byte of
  /// the files with its checksum; ranks divide the files among them.
  /// @throws error (config) naming what does not fit or is damaged
  void check(const distributed_model_base& model,
             const std::vector<distributed_optimizer*>& optimizers);

  /// Makes the coming partition that of the checkpoint, so that the numbers are
  /// the same, too. Does nothing if the number of pipeline ranks differs or the
  /// user places modules otherwise.
  void adopt_partition(const distributed_model_base& model) const;

  /// Restores the options of the optimizers' groups: learning rates and all
  /// other options that were set.
  void
  load_options(const std::vector<distributed_optimizer*>& optimizers) const;

  /// With `smp.deterministic_server` the first steps of a run determine the
  /// order in which later steps add gradients. A resumed run determines it in
  /// steps whose effects disappear when values are loaded.
  /// @param f runs all that precedes update `i`, from 0
  void rehearse(const std::vector<distributed_optimizer*>& optimizers,
                const std::function<void(uint64_t)>& f) const;

  /// Reads what this rank owns.
  /// @pre partitioned, checked
  void load(const distributed_model_base& model,
            const std::vector<distributed_optimizer*>& optimizers);

private:
  /// Runs `f`; then all ranks throw the error of the first rank that failed.
  void together(const char* name, const std::function<void()>& f) const;
  [[noreturn]] void fail(const std::string& why) const;

  void check_model(const distributed_model_base& model) const;
  void
  check_optimizers(const distributed_model_base& model,
                   const std::vector<distributed_optimizer*>& optimizers) const;
  void tell_fields(const std::vector<distributed_optimizer*>& optimizers) const;
  void
  check_states(const distributed_model_base& model,
               const std::vector<distributed_optimizer*>& optimizers) const;
  void check_file(const saved_file& x) const;
  void load_parts(const distributed_model_base& model,
                  const std::vector<distributed_optimizer*>& optimizers);

  const saved_tensor* find(tensor_role role, const std::string& name) const;
  safetensors_reader& open(const std::string& file);
  at::Tensor read(const saved_tensor& x, const tensor_slice* slice,
                  const tensor_slice* rows, uint64_t replica,
                  const at::Tensor& like);
  at::Tensor read(const saved_tensor& x, const tensor_box& box,
                  uint64_t replica, const at::Tensor& like);
  void load_state(distributed_optimizer& x, size_t number,
                  const walked_tensor& parameter, const tensor_slice* slice);

  const rank_context& rank_;
  std::string folder_;
  checkpoint_manifest manifest_;
  std::unordered_map<std::string, const saved_tensor*> index_;
  std::map<std::string, safetensors_reader> readers_; // a few, kept open
};

} // namespace smp
