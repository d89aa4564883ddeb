#pragma once

#include "partition/rank_layout.hpp"
#include "runtime/collectives/tensor_collectives.hpp"
#include "runtime/replicas/comm_hook.hpp"
#include "runtime/replicas/gradient_report.hpp"
#include "runtime/replicas/gradient_shards.hpp"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace smp {

class model_map;
class rank_context;

/// The gradients that replicas average, in buckets: the gradients of a bucket
/// are views of one tensor, which is reduced in place. A gradient is final once
/// every microbatch that reaches its parameter has added to it (R29). That
/// count is unknown in advance, but earlier steps tell how many to expect: a
/// bucket whose parameters all have that many begins while other gradients are
/// still being computed. Late additions are reduced separately and added. Each
/// rank begins buckets when it likes; at the end of a step all ranks learn
/// which buckets any rank began, and join them (R55).
class gradient_buckets {
public:
  /// @pre the model is partitioned
  /// @param rank,map outlive this
  gradient_buckets(const rank_context& rank, const model_map& map);

  ~gradient_buckets();

  gradient_buckets(const gradient_buckets&) = delete;
  gradient_buckets& operator=(const gradient_buckets&) = delete;

  // -- one step ---------------------------------------------------------------

  struct plan {
    /// Buckets may begin before the step ends.
    bool early = false;
    /// Steps of one kind are expected to reach a parameter equally often.
    uint64_t kind = 0;
    uint64_t microbatches = 1; // 0: others have samples, this replica has none
    comm_hook hook = comm_hook::allreduce;
    bucket_hook own_hook = {};
  };

  /// Records the current gradients.
  void begin_step(const plan& x);

  /// @returns the report that other ranks need before any of them continues
  gradient_report end_step();

  /// Averages the changed gradients: sparse ones over the rows that any rank
  /// has; for a parameter that some replicas did not use, theirs count as zero.
  /// Collective over the data-parallel group.
  /// @param all the reports of all ranks, merged
  /// @param first the report of the first rank
  /// @param agreed whether all ranks have the same buckets
  void average(const gradient_report& all, const gradient_report& first,
               bool agreed);

  /// For a step that is rolled back: finishes the buckets that began, and
  /// discards their gradients. Collective over the data-parallel group.
  void drop(const gradient_report& all);

  /// After a step that failed, or whose average is due later: finishes the
  /// buckets that began, keeps the gradients, and remembers that they are not
  /// averaged. Collective over the data-parallel group.
  void postpone(const gradient_report& all);

  /// Lets each replica keep only the gradients of the rows that it updates.
  /// Collective over the data-parallel group.
  void share(const std::vector<optimizer_shards::owners>& xs);

  const gradient_shards& shards() const noexcept {
    return shards_;
  }

  /// Number of training steps since gradients were averaged.
  uint64_t& passes() noexcept {
    return passes_;
  }

  // -- for tests and measurements ---------------------------------------------

  struct counts {
    uint64_t buckets = 0;
    uint64_t begun_early = 0;
    uint64_t late_gradients = 0; // in all steps, on this rank
    /// Peak memory of dense gradients.
    uint64_t peak_bytes = 0;
    /// Sums in flight to the owners of rows.
    uint64_t under_way = 0;
  };

  /// @returns the counts since the last call
  counts take_counts();

private:
  class hook;
  class share_of_slice;

  /// Detects that a gradient was changed or replaced.
  struct mark {
    const void* gradient = nullptr;
    uint64_t version = 0;

    bool operator==(const mark&) const = default;
  };

  static constexpr uint32_t nowhere = ~uint32_t{0};

  struct entry {
    uint32_t position = 0; // in the model's tensors
    at::Tensor parameter;
    /// The ranks with the same values: all replicas, or those with this slice.
    comm_group over = comm_group::dp;
    uint64_t bytes = 0; // the same on all ranks
    uint32_t bucket = nowhere;
    at::Tensor view; // into the bucket's memory, if allocated
    mark before;
    /// Its gradient has not been averaged since an earlier step.
    bool pending = false;
    /// Its gradient when the bucket began, and whether that differs from the
    /// one that all replicas had.
    at::Tensor given;
    bool changed = false;
    /// Sparse on some rank: it is reduced separately.
    bool apart = false;
    uint64_t reached = 0;  // in this step
    uint64_t in_round = 0; // since its bucket last began
    uint64_t expected = 0;
    uint64_t final_as = 0; // position among last additions
  };

  struct bucket {
    comm_group over = comm_group::dp;
    std::vector<entry*> entries;
    uint64_t bytes = 0;
    at::Tensor memory;
    at::Tensor compressed;
    /// Its gradients are sharded: then it begins each time it is full.
    bool shared = false;
    uint32_t begun = 0;
    uint64_t missing = 0; // entries that are not final
    tensor_future done;
  };

  static mark mark_of(const at::Tensor& parameter);
  static bool is_changed(const entry& x);

  entry* find(uint32_t position);
  std::vector<entry*> all_of(const std::vector<uint32_t>& positions);

  void lay_out(const std::vector<entry*>& order);
  void put(entry& x);
  uint64_t layout_hash() const;
  void learn(const gradient_report& all, const gradient_report& first,
             bool agreed, const std::vector<entry*>& sparse);
  uint64_t expected_of(const entry& x, const std::vector<uint64_t>* known,
                       size_t index) const;

  void reached(entry& x);
  void make_memory(bucket& x);
  void adopt(entry& x);
  void count_missing(bucket& x);
  void begin_full();
  void begin(bucket& x);
  void send(bucket& x);
  void note_bytes();
  void finish(bucket& x, const gradient_report& all);
  std::vector<std::pair<entry*, at::Tensor>> take_late();
  void finish_begun(const gradient_report& all);

  void average_apart(const std::vector<entry*>& xs);
  /// @returns the mean, which is written to `x` itself
  static tensor_future start_mean(const at::Tensor& x, const comm_group& over,
                                  const std::string& name);
  static tensor_future start_alone(const at::Tensor& x, const entry& of);
  at::Tensor mean_by_hook(const at::Tensor& x, const comm_group& over) const;

  const rank_context& rank_;
  std::vector<std::unique_ptr<entry>> entries_; // by position
  std::vector<bucket> buckets_;
  plan plan_;
  bool in_step_ = false;
  /// All ranks have the same buckets.
  bool agreed_ = false;
  /// Buckets follow the order in which the first rank's gradients were final.
  bool ordered_ = false;
  uint64_t reached_in_step_ = 0;
  std::vector<bucket*> full_; // those that may begin early
  /// The most often that a step of each kind reached each entry.
  std::map<uint64_t, std::vector<uint64_t>> expected_;
  gradient_shards shards_;
  std::vector<entry*> order_;
  counts counts_;
  uint64_t passes_ = 0;
  /// Pointer through which hooks, which may outlive this, reach it.
  std::shared_ptr<gradient_buckets*> self_;
};

} // namespace smp
