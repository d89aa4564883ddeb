#include "apps/web/page.hpp"

#include "apps/web/random_text.hpp"

#include <span>
#include <string_view>

namespace smp::app {

namespace {

/// JSON within an element: without "<" nothing in it ends the element.
std::string embedded(const json& x) {
  std::string result;
  for (auto c : x.dump(-1, ' ', false, json::error_handler_t::replace))
    if (c == '<')
      result += "\\u003c";
    else
      result += c;
  return result;
}

} // namespace

std::string page_html(const json& data) {
  // Browsers run only what has this mark, so that no text of a run can become
  // script.
  const auto nonce = random_text();
  const auto stored = embedded(data);
  const std::pair<std::string_view, std::string_view> parts[] = {
    {"NONCE", nonce},
    {"PAGE_CSS", page_css_text},
    {"PAGE_DATA", stored},
    {"PAGE_JS", page_js_text}};
  // In one pass, so that what is put in is not looked at.
  std::string result;
  std::string_view rest = page_html_text;
  while (!rest.empty()) {
    auto at = rest.size();
    const std::pair<std::string_view, std::string_view>* found = nullptr;
    for (auto& x : parts)
      if (auto i = rest.find(x.first); i < at) {
        at = i;
        found = &x;
      }
    result += rest.substr(0, at);
    rest.remove_prefix(at);
    if (found == nullptr)
      break;
    result += found->second;
    rest.remove_prefix(found->first.size());
  }
  return result;
}

} // namespace smp::app
