#pragma once

#include "tests/support/catch.hpp"

#include <string>

namespace smp::test {

/// @returns what stands in the first block of code in this language after
///          `heading`; fails the test if there is none.
inline std::string code_block(const std::string& markdown,
                              const std::string& heading,
                              const std::string& language = "cpp") {
  auto begin = markdown.find(heading);
  REQUIRE(begin != std::string::npos);
  auto fence = "```" + language + "\n";
  begin = markdown.find(fence, begin);
  REQUIRE(begin != std::string::npos);
  begin += fence.size();
  return markdown.substr(begin, markdown.find("```", begin) - begin);
}

} // namespace smp::test
