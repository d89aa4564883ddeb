#pragma once

// Serves a run: the page for people, its metrics for Prometheus. It is one more
// program that looks at the run from outside, so that whoever connects to it
// reaches no rank.

#include "apps/web/http_server.hpp"

#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace smp::app {

struct serve_options {
  std::string place; // see `run_source`
  std::string secret_file;
  std::optional<http_address> web;
  std::optional<http_address> prometheus;
  http_limits limits = {};
};

class run_server {
public:
  /// Serves from now on. The run is asked only while somebody looks: for the
  /// page once a second, for metrics at most twice.
  /// @throws error (config) if there is no such run, or if an address is taken
  explicit run_server(const serve_options& x);
  ~run_server();
  run_server(const run_server&) = delete;
  run_server& operator=(const run_server&) = delete;

  /// Where each server is, that of the page first; with the token that an
  /// address needs which other machines reach.
  const std::vector<std::string>& urls() const noexcept {
    return urls_;
  }

private:
  class page_server;
  class metrics_server;

  std::unique_ptr<page_server> page_;
  std::unique_ptr<metrics_server> metrics_;
  std::vector<std::string> urls_;
};

} // namespace smp::app
