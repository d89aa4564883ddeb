#pragma once

#include "runtime/train/trainer.hpp"

#include <cstdint>
#include <fstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace smp {

/// Writes what metrics.jsonl has as an event file, which TensorBoard opens:
/// scalars by step, and the partition as text. A file that cannot be continued
/// ends the log and not the run; the console says so once.
class tensorboard_log final : public train_listener {
public:
  /// Creates a file in `dir`, which is made if it is missing.
  /// @throws error (config) naming the file
  explicit tensorboard_log(const std::string& dir);

  void on_start(const train_start& x) override;
  void on_step(const step_metrics& x) override;
  void on_evaluation(uint64_t step, double loss) override;

private:
  using scalars = std::vector<std::pair<std::string_view, double>>;

  void write(uint64_t step, const scalars& xs);
  void write_text(std::string_view tag, const std::string& text);
  /// One record of TensorFlow's TFRecord format.
  void put(const std::string& event);

  std::string path_;
  std::ofstream out_;
};

} // namespace smp
