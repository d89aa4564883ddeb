#pragma once

// User code as a list of actions: every test runs in one order only, and the
// test decides how long an execution takes.

#include "actors/server/executor.hpp"

#include <algorithm>
#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace smp {

inline payload text_payload(const std::string& x) {
  auto first = reinterpret_cast<const std::byte*>(x.data());
  return {{first, first + x.size()}, {}};
}

inline std::string text_of(const payload& x) {
  return {reinterpret_cast<const char*>(x.bytes.data()), x.bytes.size()};
}

// -- the script ---------------------------------------------------------------

/// One action of a scripted module.
struct action {
  enum class kind { call, grant, wait, ret, fail, swallow, crash } what;
  rank_id owner;
  module_id module;
  phase during = phase::forward;
  std::string text;
  completion_ptr done;
};

/// Calls `module` on `owner`.
inline action do_call(uint64_t owner, uint64_t module,
                      phase during = phase::forward) {
  return {action::kind::call, {owner}, {module}, during, {}, {}};
}

/// Ends the forward phase and waits for the grant.
inline action do_grant() {
  return {action::kind::grant, {}, {}, phase::backward, {}, {}};
}

/// Waits for `x`, known to reports as `text`.
inline action do_wait(completion_ptr x, std::string text = "x") {
  return {action::kind::wait, {}, {}, {}, std::move(text), std::move(x)};
}

/// Returns `text` plus the value of the last call.
inline action do_return(std::string text) {
  return {action::kind::ret, {}, {}, phase::forward, std::move(text), {}};
}

/// User code throws.
inline action do_throw(std::string text) {
  return {action::kind::fail, {}, {}, phase::forward, std::move(text), {}};
}

/// From here on user code catches what calls throw (R6).
inline action do_swallow() {
  return {action::kind::swallow, {}, {}, phase::forward, {}, {}};
}

/// The executor itself throws: a defect of the runtime.
inline action do_crash(std::string text) {
  return {action::kind::crash, {}, {}, phase::forward, std::move(text), {}};
}

class scripted_executor;

/// What all executors of a test share.
struct stage {
  std::map<module_id, std::vector<action>> script;
  /// Lines such as "0: m3 mb1 start".
  std::vector<std::string> trace;
  /// Those that hold a token now.
  std::vector<scripted_executor*> executing;
  size_t most_executing = 0;

  /// @returns the position of a line in the trace, or its size.
  size_t at(const std::string& line) const {
    return static_cast<size_t>(std::find(trace.begin(), trace.end(), line)
                               - trace.begin());
  }

  bool has(const std::string& line) const {
    return at(line) < trace.size();
  }

  /// Lets the longest executing one get to its next stop.
  /// @returns false if none executes
  bool advance_one();

  std::function<std::shared_ptr<executor>()> factory(rank_id self);
};

// -- the executor -------------------------------------------------------------

/// Plays the script of the requested module, one stop at a time.
class scripted_executor : public executor {
public:
  scripted_executor(rank_id self, stage& on) : self_(self), stage_(on) {
    // nop
  }

  ~scripted_executor() override {
    close();
  }

  /// Goes on to the next stop. @pre it executes
  void advance() {
    std::erase(stage_.executing, this);
    while (position_ < actions().size()) {
      auto& x = actions()[position_++];
      switch (x.what) {
        case action::kind::call:
        case action::kind::grant:
        case action::kind::wait:
          parked_ = true;
          return leave(call_of(x));
        case action::kind::ret:
          return end({text_payload(x.text + last_), {}});
        case action::kind::fail:
          if (!error_)
            error_ = {error_code::user_code, self_,
                      "m" + std::to_string(current_.module.value), x.text};
          return end({});
        case action::kind::swallow:
          swallows_ = true;
          break;
        case action::kind::crash:
          throw std::logic_error("a crash comes first in its script");
      }
    }
    end({});
  }

  using executor::finish;
  using executor::leave;

private:
  const std::vector<action>& actions() const {
    return stage_.script.at(current_.module);
  }

  void wake() override {
    if (std::exchange(parked_, false))
      go_on(take_response());
    else
      begin(take_request());
    execute();
  }

  void join() override {
    std::erase(stage_.executing, this);
  }

  void begin(request x) {
    current_ = std::move(x);
    last_.clear();
    error_ = {};
    position_ = 0;
    swallows_ = false;
    note("start");
    if (actions().front().what == action::kind::crash)
      throw std::runtime_error(actions().front().text);
  }

  void go_on(const response& x) {
    last_ = text_of(x.body);
    note(x.error ? "failed" : "resume");
    if (x.error && !error_)
      error_ = x.error;
    if (x.error && !swallows_)
      position_ = actions().size();
  }

  void execute() {
    stage_.executing.push_back(this);
    stage_.most_executing = std::max(stage_.most_executing,
                                     stage_.executing.size());
  }

  static call call_of(const action& x) {
    call result;
    result.owner = x.owner;
    result.module = x.module;
    result.what = x.during;
    result.done = x.done;
    result.why.what = x.text;
    if (x.what == action::kind::grant)
      result.kind = call_kind::grant;
    else if (x.what == action::kind::wait)
      result.kind = call_kind::wait;
    return result;
  }

  void end(outcome x) {
    if (error_)
      x = {{}, error_};
    note("end");
    finish(std::move(x));
  }

  void note(const std::string& what) {
    stage_.trace.push_back(std::to_string(self_.value) + ": m"
                           + std::to_string(current_.module.value) + " mb"
                           + std::to_string(current_.microbatch.value) + " "
                           + what);
  }

  rank_id self_;
  stage& stage_;
  request current_;
  size_t position_ = 0;
  std::string last_;
  failure error_;
  bool swallows_ = false;
  bool parked_ = false;
};

inline bool stage::advance_one() {
  if (executing.empty())
    return false;
  executing.front()->advance();
  return true;
}

inline std::function<std::shared_ptr<executor>()> stage::factory(rank_id self) {
  return
    [this, self] { return std::make_shared<scripted_executor>(self, *this); };
}

} // namespace smp
