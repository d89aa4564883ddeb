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

/// A checkpoint on its way into a session, in steps: what is wrong with it is
/// known before anything is changed, and values come once it is known who owns
/// what. All of its functions are collective over the world, and throw the same
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

  /// Compares with the model and its optimizers, and every byte of the files
  /// with its checksum; ranks share the files among them.
  /// @throws error (config) naming what does not fit or is damaged
  void check(const distributed_model_base& model,
             const std::vector<distributed_optimizer*>& optimizers);

  /// Lets the coming partition be that of the checkpoint, so that the numbers
  /// are, too. Does nothing with another number of pipeline ranks, or where
  /// the user places modules otherwise.
  void adopt_partition(const distributed_model_base& model) const;

  /// Gives the groups of the optimizers their learning rates and all else that
  /// was set.
  void
  load_options(const std::vector<distributed_optimizer*>& optimizers) const;

  /// With `smp.deterministic_server` the first steps of a run find the order in
  /// which later ones add their gradients; a run that goes on finds it in steps
  /// of which nothing stays once values are loaded.
  /// @param f does all that comes before update `i`, from 0
  void rehearse(const std::vector<distributed_optimizer*>& optimizers,
                const std::function<void(uint64_t)>& f) const;

  /// Reads what this rank owns.
  /// @pre partitioned, checked
  void load(const distributed_model_base& model,
            const std::vector<distributed_optimizer*>& optimizers);

private:
  /// Runs `f`; then all ranks throw what the first of them threw.
  void together(const char* name, const std::function<void()>& f) const;
  [[noreturn]] void fail(const std::string& why) const;

  void check_model(const distributed_model_base& model) const;
  void
  check_optimizers(const distributed_model_base& model,
                   const std::vector<distributed_optimizer*>& optimizers) const;
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
  std::map<std::string, safetensors_reader> readers_; // a few, open
};

} // namespace smp
