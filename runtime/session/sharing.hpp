#pragma once

#include "runtime/model/hook.hpp"
#include "runtime/model/model_map.hpp"
#include "runtime/session/module_remarks.hpp"
#include "transport/ids.hpp"

#include <map>
#include <string>
#include <vector>

namespace smp {

class rank_context;
struct session_config;

/// What code says of a parameter: that tensor-parallel ranks cut it.
struct cut_mark {
  c10::weak_intrusive_ptr<c10::TensorImpl> parameter;
  int64_t dim = 0;
  bool scaled_batch = true; // as in `parameter_creation_options`
};

/// A parameter that tensor-parallel ranks cut, of a module that computes with
/// its peers by itself.
struct cut_parameter {
  uint32_t tensor = 0; // in the model
  int64_t dim = 0;
  /// Its gradient is one of as many batches as there are peers.
  bool scaled_batch = true;
};

template <class Inspector>
bool inspect(Inspector& f, cut_parameter& x) {
  return f.object(x).fields(f.field("tensor", x.tensor), f.field("dim", x.dim),
                            f.field("scaled_batch", x.scaled_batch));
}

/// A module that tensor-parallel ranks share.
struct shared_module {
  module_id id;
  bool saves_memory = true; // as in `native_module`
};

template <class Inspector>
bool inspect(Inspector& f, shared_module& x) {
  return f.object(x).fields(f.field("id", x.id),
                            f.field("saves_memory", x.saves_memory));
}

/// Which modules tensor-parallel ranks share (paper, section 5.2), and why not
/// others that they were to share.
struct sharing_decision {
  std::vector<shared_module> shared;
  std::vector<cut_parameter> cut;
  /// For people.
  module_remarks remarks;
};

/// Names of modules, how many ranks share, and what they save where code does
/// not say it (`native_module::saves_memory`).
struct sharing_request {
  std::vector<std::string> patterns;
  uint64_t peers = 1;
  bool saves_memory = true;
  /// All have the same samples.
  bool prescaled = false;
  /// Says of each module that could be shared why it is not looked at.
  bool explains_all = false;
};

/// @returns what the configuration wants to be shared
sharing_request sharing_wanted(const session_config& x);

/// A module is shared if (1) there is a distributed implementation of it, (2)
/// that is wanted, (3) none above it is shared already, and (4) it shares no
/// parameter with another module.
/// @param marked what code says of modules, by object
/// @throws error (config) naming a pattern that fits no module
sharing_decision
decide_sharing(const walked_model& model,
               const std::map<const void*, sharing_mark>& marked,
               const sharing_request& x);

/// Adds what code wants to be cut.
/// @throws error (config) naming a parameter that cannot be
void decide_cuts(const walked_model& model, const std::vector<cut_mark>& marks,
                 uint64_t peers, sharing_decision& result);

/// If this rank owns the parameter, whose bytes are there: keeps its slice.
/// @param rank position of this one among its peers
void cut_parameter_of(model_map& map, const cut_parameter& x, int64_t rank,
                      int64_t peers);

/// @returns what peer `rank` holds of the parameters of a module that can be
/// shared, by position in the model's tensors; each holds the others as a whole
std::map<uint32_t, tensor_slice> slices_of(const walked_model& model,
                                           const shared_module& x, int64_t rank,
                                           int64_t peers);

/// If this rank owns the module: cuts its parameters, whose bytes are there,
/// and lets the map and the hooks know how to run it.
/// @param x as it was decided
/// @param rank position of this one among its peers
/// @param wanted what was
void share_module(model_map& map, const shared_module& x, int64_t rank,
                  const sharing_request& wanted);

/// The model as the first of the ranks has it that share modules, to see what
/// it does there: while this lives, parameters are cut, and calls run the part
/// of that rank. Before the partition, in a process that has the whole model.
class sharing_rehearsal {
public:
  /// @param map outlives this
  /// @param x as it was decided
  /// @param wanted what was
  sharing_rehearsal(model_map& map, const sharing_decision& x,
                    const sharing_request& wanted);

  ~sharing_rehearsal();

  sharing_rehearsal(const sharing_rehearsal&) = delete;
  sharing_rehearsal& operator=(const sharing_rehearsal&) = delete;

private:
  void end();

  model_map& map_;
  std::map<uint32_t, at::Tensor> wholes_; // what is cut, by position
};

/// @param mine what this rank has of a tensor; undefined: nothing
/// @returns the whole, on all peers; undefined if nobody has any of it.
/// Collective over the tensor-parallel group.
at::Tensor whole_of(const rank_context& rank, const at::Tensor& mine,
                    const tensor_slice& slice);

} // namespace smp
