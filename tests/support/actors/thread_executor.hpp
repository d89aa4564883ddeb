#pragma once

// User code on a thread that parks, as in runtime/, with strings for tensors.

#include "actors/protocol/request_number.hpp"
#include "actors/server/executor.hpp"
#include "tests/support/actors/scripted_executor.hpp"
#include "transport/wake_up.hpp"

#include <atomic>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <thread>
#include <utility>

namespace smp {

/// What test code sees of its execution.
class thread_caller {
public:
  virtual ~thread_caller() = default;

  /// @throws error
  virtual std::string call(uint64_t owner, uint64_t module, phase what,
                           const std::string& args)
    = 0;

  /// What a call returns that goes on.
  struct promise {
    completion_ptr answer;
    uint64_t number = 0;
  };

  virtual promise promise_call(uint64_t owner, uint64_t module, phase what,
                               const std::string& args)
    = 0;

  virtual void await_grant() = 0;

  virtual void await(const completion_ptr& x, const wait_reason& why = {}) = 0;
};

using thread_body = std::function<std::string(thread_caller&,
                                              const std::string& args)>;

using thread_modules = std::map<module_id, thread_body>;

class thread_executor : public executor, private thread_caller {
public:
  /// @param inside counts executions that hold a token
  thread_executor(const thread_modules& modules, std::atomic<int>& inside,
                  std::atomic<int>& most_inside)
    : modules_(modules),
      inside_(inside),
      most_inside_(most_inside),
      thread_([this] { run(); }) {
    // nop
  }

  ~thread_executor() override {
    close();
  }

private:
  void run() {
    // One wake-up announces the end; a call that unwinds may have consumed it.
    while (!closing()) {
      pause();
      if (closing())
        return;
      enter();
      auto x = execute();
      switch_out();
      finish(std::move(x));
    }
  }

  outcome execute() {
    request_ = take_request();
    error_ = {};
    outcome result;
    try {
      auto& body = modules_.at(request_.module);
      result.body = text_payload(body(*this, text_of(request_.body)));
    } catch (const error& e) {
      if (!error_)
        error_ = e.cause();
    } catch (const std::exception& e) {
      if (!error_)
        error_ = {error_code::user_code, request_.id.origin, {}, e.what()};
    }
    if (error_)
      return {{}, error_};
    return result;
  }

  std::string call(uint64_t owner, uint64_t module, phase what,
                   const std::string& args) override {
    return text_of(park(call_of(owner, module, what, args)).body);
  }

  promise promise_call(uint64_t owner, uint64_t module, phase what,
                       const std::string& args) override {
    auto answer = std::make_shared<awaited<response>>();
    auto x = call_of(owner, module, what, args);
    x.kind = call_kind::promise;
    x.number = promise_number(request_.step, ++promises_);
    x.answer = answer;
    promise result{answer, x.number};
    send(std::move(x));
    return result;
  }

  void await_grant() override {
    smp::call x;
    x.kind = call_kind::grant;
    x.what = phase::backward;
    park(std::move(x));
  }

  void await(const completion_ptr& done, const wait_reason& why) override {
    smp::call x;
    x.kind = call_kind::wait;
    x.done = done;
    x.why = why;
    park(std::move(x));
  }

  static smp::call call_of(uint64_t owner, uint64_t module, phase what,
                           const std::string& args) {
    smp::call x;
    x.owner = rank_id{owner};
    x.module = module_id{module};
    x.what = what;
    x.body = text_payload(args);
    return x;
  }

  // -- executor ---------------------------------------------------------------

  void wake() override {
    wake_.notify();
  }

  void join() override {
    wake_.notify();
    thread_.join();
  }

  void begin_call(call_kind, std::optional<rank_id>) override {
    if (error_)
      throw error{error_};
  }

  void switch_out() override {
    --inside_;
  }

  void pause() override {
    wake_.wait();
  }

  void switch_in(const failure& why) override {
    enter();
    error_ = why;
    if (closing())
      error_ = {error_code::cancelled, {}, {}, "closing"};
    if (error_)
      throw error{error_};
  }

  void enter() {
    auto now = ++inside_;
    auto most = most_inside_.load();
    while (now > most && !most_inside_.compare_exchange_weak(most, now))
      ; // nop
  }

  const thread_modules& modules_;
  std::atomic<int>& inside_;
  std::atomic<int>& most_inside_;
  request request_;
  failure error_;
  uint32_t promises_ = 0;
  /// Counting: the end may come on top of a wake-up not consumed yet.
  wake_up wake_;
  std::thread thread_;
};

} // namespace smp
