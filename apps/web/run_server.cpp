#include "apps/web/run_server.hpp"

#include "apps/web/page.hpp"
#include "apps/web/prometheus_text.hpp"
#include "apps/web/random_text.hpp"
#include "apps/web/run_feed.hpp"
#include "transport/error.hpp"

#include <fmt/format.h>

#include <array>
#include <chrono>
#include <condition_variable>
#include <filesystem>
#include <functional>
#include <map>
#include <mutex>
#include <thread>
#include <utility>

#include <unistd.h>

namespace smp::app {

namespace {

using clock = std::chrono::steady_clock;
using shared_text = std::shared_ptr<const std::string>;

constexpr std::chrono::milliseconds page_interval{1000};

/// So long after a look, nobody gets another one.
constexpr std::chrono::milliseconds least_interval{400};

shared_text share(std::string x) {
  return std::make_shared<const std::string>(std::move(x));
}

http_reply not_found() {
  return {404, "text/plain; charset=utf-8", share("nothing is here\n")};
}

std::string token_for(const http_address& x) {
  return x.loopback ? std::string{} : random_text();
}

std::string url_of(http_address x, uint16_t port, const std::string& path,
                   const std::string& token) {
  x.port = port;
  if (x.host == "0.0.0.0" || x.host == "::") {
    std::array<char, 256> name{};
    if (::gethostname(name.data(), name.size() - 1) == 0)
      x.host = name.data();
  }
  return fmt::format("http://{}{}{}", x.text(), path,
                     token.empty() ? "" : "?token=" + token);
}

/// @returns the last part of a path
std::string name_of(const std::string& place) {
  auto path = std::filesystem::path{place}.lexically_normal();
  return path.has_filename() ? path.filename().string()
                             : path.parent_path().filename().string();
}

/// A thread that works when somebody wants something.
class worker {
public:
  explicit worker(std::function<clock::time_point()> work)
    : work_(std::move(work)), thread_([this] { run(); }) {
    // nop
  }

  ~worker() {
    stop();
  }

  worker(const worker&) = delete;
  worker& operator=(const worker&) = delete;

  /// From now on it does nothing.
  void stop() {
    {
      std::lock_guard guard{mutex_};
      stops_ = true;
    }
    changed_.notify_all();
    if (thread_.joinable())
      thread_.join();
  }

  void wake() {
    {
      std::lock_guard guard{mutex_};
      wanted_ = true;
    }
    changed_.notify_all();
  }

private:
  void run() {
    std::unique_lock guard{mutex_};
    auto next = clock::time_point::max();
    while (!stops_) {
      auto ready = [this] { return stops_ || wanted_; };
      if (next == clock::time_point::max())
        changed_.wait(guard, ready);
      else
        changed_.wait_until(guard, next, ready);
      if (stops_)
        return;
      wanted_ = false;
      guard.unlock();
      const auto begin = clock::now();
      next = work_();
      guard.lock();
      changed_.wait_until(guard, begin + least_interval,
                          [this] { return stops_; });
    }
  }

  /// @returns when to work again, if nobody wants it earlier
  std::function<clock::time_point()> work_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool stops_ = false;
  bool wanted_ = false;
  std::thread thread_;
};

/// What is shown if looking itself fails, such as for a file that others may
/// read.
run_look failed_look(const std::exception& e) {
  run_look result;
  result.text = e.what();
  return result;
}

} // namespace

// -- the page -----------------------------------------------------------------

class run_server::page_server {
public:
  explicit page_server(const serve_options& x)
    : place_(x.place),
      token_(token_for(*x.web)),
      feed_(x.place, x.secret_file),
      page_(share(page_html())),
      worker_([this] { return look(); }),
      server_(options_of(x)) {
    url = url_of(*x.web, server_.port(), "/", token_);
  }

  ~page_server() {
    worker_.stop(); // it uses the server, which wakes it
  }

  std::string url;

private:
  http_server::options options_of(const serve_options& x) {
    http_server::options result;
    result.address = *x.web;
    result.token = token_;
    result.limits = x.limits;
    result.answer = [this](const std::string& path,
                           const http_server::answer_to& to) {
      to(path == "/" ? http_reply{200, "text/html; charset=utf-8", page_}
                     : not_found());
    };
    result.stream_path = "/events";
    result.on_stream = [this] { worker_.wake(); };
    return result;
  }

  clock::time_point look() {
    if (server_.streams() == 0)
      return clock::time_point::max();
    const auto begin = clock::now();
    try {
      publish(feed_.look());
    } catch (const std::exception& e) {
      publish({{"run", head_json(place_, failed_look(e))}});
    }
    return begin + page_interval;
  }

  /// Sends what has changed.
  void publish(const json& parts) {
    std::string news, all;
    for (auto& [name, value] : parts.items()) {
      auto text = fmt::format(
        ",\"{}\":{}", name,
        value.dump(-1, ' ', false, json::error_handler_t::replace));
      all += text;
      if (auto& last = last_[name]; last != text) {
        last = text;
        news += text;
      }
    }
    server_.publish(event_of(news), event_of(all));
  }

  static shared_text event_of(const std::string& members) {
    return share(fmt::format("data: {{{}}}\n\n",
                             members.empty() ? members : members.substr(1)));
  }

  std::string place_;
  std::string token_;
  run_feed feed_;
  shared_text page_;
  std::map<std::string, std::string> last_;
  worker worker_;
  http_server server_;
};

// -- metrics ------------------------------------------------------------------

class run_server::metrics_server {
public:
  explicit metrics_server(const serve_options& x)
    : token_(token_for(*x.prometheus)),
      run_(name_of(x.place)),
      source_(x.place, x.secret_file),
      history_(x.place + "/metrics.jsonl"),
      worker_([this] { return answer_all(); }),
      server_(options_of(x)) {
    url = url_of(*x.prometheus, server_.port(), "/metrics", token_);
  }

  ~metrics_server() {
    worker_.stop();
  }

  std::string url;

private:
  http_server::options options_of(const serve_options& x) {
    http_server::options result;
    result.address = *x.prometheus;
    result.token = token_;
    result.limits = x.limits;
    result.answer = [this](const std::string& path, http_server::answer_to to) {
      if (path != "/metrics")
        return to(not_found());
      {
        std::lock_guard guard{mutex_};
        waiting_.push_back(std::move(to));
      }
      worker_.wake();
    };
    return result;
  }

  /// One look for all who wait.
  clock::time_point answer_all() {
    auto text = share(look());
    std::vector<http_server::answer_to> all;
    {
      std::lock_guard guard{mutex_};
      all.swap(waiting_);
    }
    for (auto& to : all)
      to({200, "text/plain; version=0.0.4; charset=utf-8", text});
    return clock::time_point::max();
  }

  std::string look() {
    run_look now;
    try {
      now = source_.look();
    } catch (const std::exception& e) {
      now = failed_look(e);
    }
    while (history_.update()) {
      // of a long run, some megabytes at a time
    }
    return prometheus_text({run_, now, history_.totals(), history_.last(),
                            std::chrono::system_clock::now()});
  }

  std::string token_;
  std::string run_;
  run_source source_;
  metrics_history history_;
  std::mutex mutex_;
  std::vector<http_server::answer_to> waiting_;
  worker worker_;
  http_server server_;
};

// -- both ---------------------------------------------------------------------

run_server::run_server(const serve_options& x) {
  if (x.web) {
    page_ = std::make_unique<page_server>(x);
    urls_.push_back(page_->url);
  }
  if (x.prometheus) {
    metrics_ = std::make_unique<metrics_server>(x);
    urls_.push_back(metrics_->url);
  }
}

run_server::~run_server() = default;

} // namespace smp::app
