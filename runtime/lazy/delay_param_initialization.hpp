#pragma once

namespace smp {

/// A model that is larger than the memory of one process cannot be created and
/// then partitioned. Inside of this scope tensors get no memory: their sizes
/// and types are known, and what would have filled them (`torch::randn`,
/// `torch::nn::init::*`, `weight.data().mul_(0.5)`, `weight[0].zero_()`, ...)
/// is captured. At the partition each rank computes what it owns, bit for bit
/// what it would be without the scope; the rest never exists.
///
///     torch::manual_seed(1);
///     auto make = [] {
///       smp::delay_param_initialization deferring;
///       return net{};
///     };
///     smp::distributed_model model{make()};
///
/// - All of the model's own constructors and initialisers work unchanged.
///   Random numbers are drawn at once, into memory that is freed at once, so
///   the generator is always where it would be without the scope. `normal_` and
///   `uniform_` take little for that; else the largest single tensor bounds the
///   memory needed.
/// - Code that needs a value (`item()`, printing, `data_ptr()`) gets it: it is
///   computed then. `data_ptr()` keeps it, other reads do not.
/// - Tensors of up to 4 KB, and tensors on other devices, are made at once.
/// - A tensor from outside that is copied in is kept until the partition, so
///   read values from a file by `smp::load_state_dict`.
/// - After the scope, in-place operations on the model are still captured; any
///   other use of a tensor makes it an ordinary one. So without a partition
///   the model works, too, and needs the memory of an ordinary one.
/// - Gradients do not flow back through operations of the scope: `backward`
///   through a tensor computed there from parameters is an error that says so.
///
/// After the paper's API, `smp.delay_param_initialization(enabled)`. Source of
/// the mechanism: capturing behind a dispatch key as torchdistx's
/// deferred_init, but with the generator's state kept per random operation.
class delay_param_initialization {
public:
  /// @param enabled false makes an inner scope in which nothing is deferred
  explicit delay_param_initialization(bool enabled = true);

  ~delay_param_initialization();

  delay_param_initialization(const delay_param_initialization&) = delete;
  delay_param_initialization& operator=(const delay_param_initialization&)
    = delete;

private:
  bool before_;
};

} // namespace smp
