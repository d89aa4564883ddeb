#pragma once

// The page, with its style and its script in it: it loads nothing.

#include "apps/report/run_json.hpp"

#include <string>

namespace smp::app {

/// The parts of apps/web/page.*, which the build embeds.
extern const char* const page_html_text;
extern const char* const page_css_text;
extern const char* const page_js_text;

/// @param data the parts of one look (`run_feed`), for a page that stays as it
///        is; null: the page asks for them, again and again
std::string page_html(const json& data = {});

} // namespace smp::app
