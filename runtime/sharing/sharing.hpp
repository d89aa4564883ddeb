#pragma once

#include "runtime/model/hook.hpp"
#include "runtime/model/model_map.hpp"
#include "runtime/model/partition_notes.hpp"
#include "transport/ids.hpp"

#include <map>
#include <string>
#include <vector>

namespace smp {

class rank_context;
struct session_config;

/// A mark from user code: tensor-parallel ranks cut this parameter.
struct cut_mark {
  c10::weak_intrusive_ptr<c10::TensorImpl> parameter;
  int64_t dim = 0;
  bool scaled_batch = true; // as in `parameter_creation_options`
};

/// A parameter that tensor-parallel ranks cut, of a module that communicates
/// with its peers itself.
struct cut_parameter {
  uint32_t tensor = 0; // in the model
  int64_t dim = 0;
  /// Its gradient covers as many batches as there are peers.
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

/// The modules that tensor-parallel ranks share (paper, section 5.2), and why
/// other requested ones are not shared.
struct sharing_decision {
  std::vector<shared_module> shared;
  std::vector<cut_parameter> cut;
  /// For the partition print.
  partition_notes remarks;
};

/// Names of modules, how many ranks share, and what to save unless code says
/// otherwise (`native_module::saves_memory`).
struct sharing_request {
  std::vector<std::string> patterns;
  uint64_t peers = 1;
  bool saves_memory = true;
  /// All peers have the same samples.
  bool prescaled = false;
  /// Gives a reason for each shareable module that is not considered.
  bool explains_all = false;
  /// Classes of files that the configuration registers.
  std::vector<std::string> classes = {};
};

/// Registers the classes that the configuration names (`tp_register`).
/// @throws error (config) naming an entry with an unknown module
void register_classes(const session_config& x);

/// @returns the sharing that the configuration requests
sharing_request sharing_wanted(const session_config& x);

/// A module is shared if (1) there is a distributed implementation of it, (2)
/// sharing it is requested, (3) no ancestor is shared already, and (4) it
/// shares no parameter with another module.
/// @param marked the marks of user code, by object
/// @throws error (config) naming a pattern that matches no module, or a class
/// that no module has
sharing_decision
decide_sharing(const walked_model& model,
               const std::map<const void*, sharing_mark>& marked,
               const sharing_request& x);

/// Adds the parameters that user code wants to cut.
/// @throws error (config) naming a parameter that cannot be cut
void decide_cuts(const walked_model& model, const std::vector<cut_mark>& marks,
                 uint64_t peers, sharing_decision& result);

/// If this rank owns the parameter, which is allocated: keeps only its slice.
/// @param rank position of this rank among its peers
void cut_parameter_of(model_map& map, const cut_parameter& x, int64_t rank,
                      int64_t peers);

/// @returns the slices of a shareable module's parameters that peer `rank`
/// holds, by position in the model's tensors; each peer holds all others whole
std::map<uint32_t, tensor_slice> slices_of(const walked_model& model,
                                           const shared_module& x, int64_t rank,
                                           int64_t peers);

/// If this rank owns the module: cuts its parameters, which are allocated, and
/// tells the map and the hooks how to run it.
/// @param x the decision
/// @param rank position of this rank among its peers
/// @param wanted the request
void share_module(model_map& map, const shared_module& x, int64_t rank,
                  const sharing_request& wanted);

/// The model as the first of the sharing ranks would have it, to measure it
/// there: while this is alive, parameters are cut, and calls run that rank's
/// part. Before the partition, in a process that has the whole model.
class sharing_rehearsal {
public:
  /// @param map outlives this
  /// @param x the decision
  /// @param wanted the request
  sharing_rehearsal(model_map& map, const sharing_decision& x,
                    const sharing_request& wanted);

  ~sharing_rehearsal();

  sharing_rehearsal(const sharing_rehearsal&) = delete;
  sharing_rehearsal& operator=(const sharing_rehearsal&) = delete;

private:
  void end();

  model_map& map_;
  std::map<uint32_t, at::Tensor> wholes_; // cut tensors, by position
};

/// @param mine this rank's part of a tensor; undefined: nothing
/// @returns the whole, on all peers; undefined if no peer has a part.
/// Collective over the tensor-parallel group.
at::Tensor whole_of(const rank_context& rank, const at::Tensor& mine,
                    const tensor_slice& slice);

} // namespace smp
