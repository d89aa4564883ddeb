#include "runtime/config_schema.hpp"

#include <fmt/format.h>

namespace smp {

namespace {

/// @returns "smp.microbatches = 8", as the user would write it.
std::string setting(std::string_view name, const train_config& x) {
  return fmt::format("{} = {}", name, value_text(*find_config_key(name), x));
}

class rule_book {
public:
  explicit rule_book(const train_config& x) : x_(effective(x)) {
    // nop
  }

  /// Adds a conflict between two keys: "KEY = VALUE why OTHER = VALUE; hint".
  void add(const char* key, const char* why, const char* other,
           const std::string& hint) {
    found_.push_back({{key, other},
                      fmt::format("{} {} {}; {}", setting(key, x_), why,
                                  setting(other, x_), hint)});
  }

  void check_batch() {
    auto batch = x_.data.batch_size;
    auto parts = x_.smp.microbatches;
    if (batch % parts != 0)
      add("data.batch_size", "cannot be divided into", "smp.microbatches",
          fmt::format("write a multiple, e.g. data.batch_size = {}",
                      (batch / parts + 1) * parts));
  }

  void check_gpt() {
    if (x_.model.type != "gpt")
      return;
    if (x_.model.width % x_.model.heads != 0)
      add("model.width", "cannot be divided among", "model.heads",
          fmt::format("write a multiple, e.g. model.width = {}",
                      (x_.model.width / x_.model.heads + 1) * x_.model.heads));
    if (*x_.model.sequence_length < x_.data.sequence_length)
      add("model.sequence_length", "is less than", "data.sequence_length",
          fmt::format("write at least {}, or leave it out",
                      x_.data.sequence_length));
    if (x_.data.type == "text" && *x_.model.vocabulary < 256)
      add("model.vocabulary", "is too small for the bytes of", "data.type",
          "write at least 256, or leave it out");
  }

  void check_steps() {
    if (x_.train.eval_interval > 0 && x_.train.eval_steps == 0)
      add("train.eval_interval", "has no effect with", "train.eval_steps",
          "write at least train.eval_steps = 1, or leave the interval out");
    if (x_.optimizer.schedule.final_lr > x_.optimizer.lr)
      add("optimizer.schedule.final_lr", "is more than", "optimizer.lr",
          "the learning rate falls after the warm-up");
  }

  std::vector<config_conflict> take() {
    return std::move(found_);
  }

private:
  train_config x_;
  std::vector<config_conflict> found_;
};

} // namespace

std::vector<config_conflict> conflicts(const train_config& x) {
  rule_book rules{x};
  rules.check_batch();
  rules.check_gpt();
  rules.check_steps();
  auto result = conflicts(x.smp);
  for (auto& conflict : rules.take())
    result.push_back(std::move(conflict));
  return result;
}

train_config effective(train_config x) {
  x.smp.active_microbatches = effective_active_microbatches(x.smp);
  x.smp.memory_weight = effective_memory_weight(x.smp);
  auto fill = [](auto& field, auto value) {
    if (!field)
      field = value;
  };
  fill(x.model.sequence_length, x.data.sequence_length);
  fill(x.model.vocabulary, 256);
  fill(x.optimizer.eps, x.optimizer.type == "adagrad" ? 1e-10 : 1e-8);
  fill(x.optimizer.weight_decay, x.optimizer.type == "adamw" ? 0.01 : 0.0);
  return x;
}

} // namespace smp
