#pragma once

namespace smp {

/// A model that is larger than the memory of one process cannot be created
/// first and partitioned afterwards. Inside this scope tensors get no memory:
/// their sizes and types are known, and what would fill them (`torch::randn`,
/// `torch::nn::init::*`, `weight.data().mul_(0.5)`, `weight[0].zero_()`, ...)
/// is captured. At the partition each rank computes what it owns, bit for bit
/// as without the scope; the rest never exists.
///
///     torch::manual_seed(1);
///     auto make = [] {
///       smp::delay_param_initialization deferring;
///       return net{};
///     };
///     smp::distributed_model model{make()};
///
/// - The model's own constructors and initialisers work unchanged. Random
///   numbers are drawn at once, into memory that is freed at once, so the
///   generator is always where it would be without the scope. `normal_` and
///   `uniform_` take little memory for that; with other initialisers, it takes
///   up to that of the largest single tensor.
/// - Code that needs a value (`item()`, printing, `data_ptr()`) gets it: the
///   value is computed then. `data_ptr()` keeps it, other reads do not.
/// - Tensors of up to 4 KB, and tensors on other devices, are made at once.
/// - A tensor from outside that is copied in is kept until the partition, so
///   read values from a file with `smp::load_state_dict`.
/// - After the scope, in-place operations on the model are still captured; any
///   other use of a tensor makes it an ordinary one. So without a partition
///   the model works, too, and needs the memory of an ordinary one.
/// - Gradients do not flow back through operations of the scope: `backward`
///   through a tensor computed there from parameters is an error that says so.
///
/// Follows the paper's API, `smp.delay_param_initialization(enabled)`. The
/// mechanism, capture behind a dispatch key, is that of torchdistx's
/// deferred_init, but keeps the generator's state for each random operation.
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
