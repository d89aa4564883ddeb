#pragma once

// A configuration that is right, and ways to break it.

#include "runtime/config/config_file.hpp"
#include "tests/support/catch.hpp"

#include <string>
#include <vector>

namespace smp::test {

inline constexpr const char* good = R"([smp]
pipeline_parallel_degree = 2
microbatches = 8

[model]
type = "gpt"

[data]
type = "text"
path = "text.txt"
sequence_length = 128
batch_size = 32

[train]
steps = 100
)";

/// `good` with the line that begins with `from` replaced.
inline std::string with(const std::string& from, const std::string& to) {
  std::string text = good;
  auto begin = text.find(from);
  REQUIRE(begin != std::string::npos);
  return text.replace(begin, text.find('\n', begin) - begin, to);
}

/// `good` without that line, which stays empty.
inline std::string without(const std::string& line) {
  return with(line, "");
}

/// `good` and more at its end, in [train].
inline std::string and_also(const std::string& lines) {
  return good + lines + "\n";
}

inline config_report parse(const std::string& text,
                           const std::vector<std::string>& overrides = {}) {
  return parse_config(text, "run.toml", overrides);
}

inline train_config config_of(const std::string& text,
                              const std::vector<std::string>& overrides = {}) {
  auto report = parse(text, overrides);
  CAPTURE(report.errors);
  REQUIRE(report.errors.empty());
  return report.config;
}

/// A configuration that is refused with one error at one place.
struct broken {
  const char* what;
  std::string text;
  /// The whole place, as the line begins.
  std::string place;
  /// What the line must say: the key, the nearest name, what is allowed.
  std::vector<std::string> says;
  std::vector<std::string> overrides = {};
};

inline void check_refusal(const broken& x) {
  CAPTURE(x.what);
  auto errors = parse(x.text, x.overrides).errors;
  CAPTURE(errors);
  // A table under a wrong name also leaves its required keys missing.
  REQUIRE_FALSE(errors.empty());
  std::erase_if(errors, [&](const std::string& line) {
    return !line.starts_with(x.place);
  });
  REQUIRE(errors.size() == 1);
  CHECK(errors[0].find('\n') == std::string::npos);
  for (auto& text : x.says)
    CHECK_THAT(errors[0], Catch::Matchers::ContainsSubstring(text));
}

} // namespace smp::test
