#pragma once

#include "tests/support/catch.hpp"

#include <sstream>
#include <string>
#include <vector>

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

using text_lines = std::vector<std::string>;

inline text_lines lines_of(const std::string& x) {
  std::istringstream in{x};
  text_lines result;
  for (std::string line; std::getline(in, line);)
    result.push_back(line);
  return result;
}

/// @returns the blocks of C++ in a page.
inline std::vector<text_lines> code_blocks(const std::string& page) {
  std::vector<text_lines> result;
  bool inside = false;
  for (auto& line : lines_of(page)) {
    if (line.starts_with("```")) {
      inside = !inside && line == "```cpp";
      if (inside)
        result.emplace_back();
    } else if (inside) {
      result.back().push_back(line);
    }
  }
  return result;
}

/// Whether the lines stand in `source` one after the other, indented alike.
inline bool stands_in(const text_lines& block, const text_lines& source) {
  auto stands_at = [&](size_t begin) {
    auto indent = source[begin].size() - block[0].size();
    for (size_t i = 0; i < block.size(); ++i)
      if (source[begin + i]
          != (block[i].empty() ? "" : std::string(indent, ' ') + block[i]))
        return false;
    return true;
  };
  for (size_t i = 0; i + block.size() <= source.size(); ++i)
    if (source[i].size() >= block[0].size() && stands_at(i))
      return true;
  return false;
}

} // namespace smp::test
