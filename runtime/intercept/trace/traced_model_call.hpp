#pragma once

#include <chrono>
#include <cstddef>
#include <vector>

namespace smp {

class tracer;

/// A call of the whole model in a step body. While the model is traced, it is
/// made several times:
///
///   traced_model_call call;
///   while (call.again())
///     model->forward(x);
///   return model->forward(x);
class traced_model_call {
public:
  traced_model_call();
  ~traced_model_call();

  traced_model_call(const traced_model_call&) = delete;
  traced_model_call& operator=(const traced_model_call&) = delete;

  /// @returns whether to call the model once more, for the trace only.
  bool again() {
    return tracer_ != nullptr && next();
  }

private:
  using clock = std::chrono::steady_clock;

  bool next();
  void end_pass();

  tracer* tracer_;        // null: no trace, or inside a traced call
  bool measured_ = false; // in an earlier run of the body
  size_t passes_ = 0;
  size_t stable_ = 0; // consecutive passes without notable speed-up
  clock::time_point begin_;
  size_t number_ = 0;        // of all passes, as one call of no module
  std::vector<double> best_; // seconds of the fastest pass, by module
};

} // namespace smp
