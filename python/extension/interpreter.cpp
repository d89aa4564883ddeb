#include "python/extension/interpreter.hpp"

#include "runtime/calls/backward_engine.hpp"
#include "runtime/intercept/trace/tracer.hpp"
#include "transport/wait.hpp"

#include <pthread.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <map>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

namespace smp::python {

namespace {

// Never destroyed: the interpreter ends before static objects do.
py::object& error_class = *new py::object;
py::object& finished_class = *new py::object;
/// What user code raised, by what `rethrow_for_engine` said of it. Several: an
/// execution that is cancelled raises, too.
auto& exceptions = *new std::map<std::string, py::object>;

void* release_lock() {
  return PyGILState_Check() == 1 ? PyEval_SaveThread() : nullptr;
}

void take_lock(void* x) {
  PyEval_RestoreThread(static_cast<PyThreadState*>(x));
}

/// Finds out for stall reports whether threads get the lock. On a thread of its
/// own, as native code of the user may never give it back.
class lock_questions {
public:
  /// See `lock_of_waits::ask`.
  double ask() {
    std::lock_guard guard{mutex_};
    if (asks_since_)
      return std::chrono::duration<double>(clock::now() - *asks_since_).count();
    if (!std::exchange(started_, true))
      std::thread{[this] { run(); }}.detach();
    asks_since_ = clock::now();
    asked_.notify_one();
    return 0;
  }

private:
  using clock = std::chrono::steady_clock;

  void run() {
    pthread_setname_np(pthread_self(), "smp.lock");
    for (;;) {
      {
        std::unique_lock guard{mutex_};
        asked_.wait(guard, [this] { return asks_since_.has_value(); });
      }
      if (Py_IsInitialized() != 0)
        running_python got_it;
      std::lock_guard guard{mutex_};
      asks_since_.reset();
    }
  }

  std::mutex mutex_;
  std::condition_variable asked_;
  std::optional<clock::time_point> asks_since_;
  bool started_ = false;
};

double ask_for_it() {
  static auto& questions = *new lock_questions; // its thread never ends
  return questions.ask();
}

/// @returns smp.Error with the parts of its cause
py::object exception_of(const error& x) {
  PyErr_Clear(); // one that the engine has passed on as this
  auto& cause = x.cause();
  auto result = error_class(x.what());
  result.attr("code") = to_string(cause.code);
  result.attr("rank") = cause.rank == no_rank
                          ? py::object{py::none()}
                          : py::object{py::int_(cause.rank.value)};
  result.attr("module") = cause.module;
  result.attr("text") = cause.text;
  return result;
}

void translate(std::exception_ptr x) {
  try {
    if (x)
      std::rethrow_exception(x);
  } catch (const tracer::finished&) {
    PyErr_SetNone(finished_class.ptr());
  } catch (const error& e) {
    PyErr_SetObject(error_class.ptr(), exception_of(e).ptr());
  }
}

/// The reverse of `exception_of`.
failure cause_of(py::handle x) {
  failure result;
  result.code = error_code_called(py::str(x.attr("code")));
  if (auto rank = x.attr("rank"); !rank.is_none())
    result.rank = rank_id{rank.cast<uint64_t>()};
  result.module = py::str(x.attr("module"));
  result.text = py::str(x.attr("text"));
  return result;
}

/// "KeyError: 'x'", then where, the innermost line last, without smp's own.
std::string text_of(py::error_already_set& x) {
  return py::module_::import("smp._errors")
    .attr("text_of")(x.type(), x.value(), x.trace())
    .cast<std::string>();
}

/// @returns what an exception of user code says
/// @throws error, or `tracer::finished`, if it is one of the engine itself
std::string text_for_engine(py::error_already_set& x) {
  if (x.matches(finished_class))
    throw tracer::finished{};
  if (x.matches(error_class) && py::hasattr(x.value(), "code"))
    throw error{cause_of(x.value())};
  auto text = text_of(x);
  exceptions.insert_or_assign(text, x.value());
  return text;
}

/// An exception of a backward function, or of a hook of a gradient.
std::string take_engine_error() {
  py::gil_scoped_acquire lock;
  if (PyErr_Occurred() == nullptr)
    return {};
  py::error_already_set x; // takes it from the thread
  return text_for_engine(x);
}

} // namespace

void prepare_interpreter(const py::object& error, const py::object& finished) {
  error_class = error;
  finished_class = finished;
  release_in_waits({&release_lock, &take_lock, &ask_for_it});
  take_engine_errors(&take_engine_error);
  py::register_exception_translator(&translate);
}

running_python::kept_state::kept_state() {
  thread_local bool kept = false;
  if (kept || PyGILState_GetThisThreadState() != nullptr)
    return;
  kept = true;
  PyGILState_Ensure();
  PyEval_SaveThread();
}

running_python::running_python() = default;

shared_object::~shared_object() {
  if (!object_)
    return;
  if (Py_IsInitialized() == 0) {
    object_.release(); // the interpreter is gone, and with it the object
    return;
  }
  py::gil_scoped_acquire lock;
  object_ = {};
}

void rethrow_for_engine(py::error_already_set& x) {
  throw error{error_code::user_code, text_for_engine(x)};
}

py::object take_exception(const std::string& text) {
  auto found = exceptions.find(text);
  py::object result = found == exceptions.end() ? py::none() : found->second;
  exceptions.clear();
  return result;
}

error_code error_code_called(const std::string& name) {
  for (uint8_t i = 0; i <= static_cast<uint8_t>(last_of(error_code{})); ++i)
    if (name == to_string(static_cast<error_code>(i)))
      return static_cast<error_code>(i);
  return error_code::user_code;
}

std::string path_of_class(py::handle type) {
  return py::str(type.attr("__module__")).cast<std::string>() + "."
         + py::str(type.attr("__qualname__")).cast<std::string>();
}

} // namespace smp::python
