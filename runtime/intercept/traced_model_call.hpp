#pragma once

#include <chrono>
#include <cstddef>
#include <vector>

namespace smp {

class tracer;

/// A call of the whole model in the body of a step, which is made several times
/// while the model is traced:
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

  /// @returns whether the model is to be called once more, for the trace only.
  bool again() {
    return tracer_ != nullptr && next();
  }

private:
  using clock = std::chrono::steady_clock;

  bool next();
  void end_pass();

  tracer* tracer_; // null: no trace, or inside of a traced call
  size_t passes_ = 0;
  size_t stable_ = 0; // passes in a row that found hardly anything faster
  clock::time_point begin_;
  std::vector<double> before_; // seconds of what was traced before, by module
  std::vector<double> best_;   // seconds of the fastest pass, by module
};

} // namespace smp
