#include "runtime/intercept/script/script_body.hpp"

#include "runtime/base/rank_context.hpp"
#include "runtime/base/script_error_text.hpp"
#include "runtime/config/session_config.hpp"
#include "runtime/lazy/promise.hpp"
#include "runtime/model/script_code.hpp"
#include "runtime/model/traced_code.hpp"
#include "transport/error.hpp"

#include <fmt/format.h>
#include <torch/csrc/jit/api/function_impl.h>
#include <torch/csrc/jit/runtime/jit_exception.h>

namespace smp {

namespace {

namespace iv = c10::ivalue;
namespace jit = torch::jit;

/// Dim 0 of the first argument; 0: it is not a tensor, or has none. A promise
/// is not asked, as it may have to wait for its sizes.
int64_t rows_of(const jit::Stack& stack) {
  if (stack.size() < 2 || !stack[1].isTensor())
    return 0;
  auto& x = stack[1].toTensor();
  return x.defined() && !is_promise(x) && !x.is_nested() && x.dim() > 0
           ? x.size(0)
           : 0;
}

/// Of the running step; before the first one, those of the configuration.
int64_t microbatches() {
  auto* rank = rank_context::current();
  if (!rank)
    return 0;
  auto running = rank->counters().microbatches.load();
  return static_cast<int64_t>(running > 0 ? running
                                          : rank->config().microbatches);
}

/// @returns what to add to an error of this code; mostly nothing
std::string remark_on_rows(jit::Function& code, int64_t rows) {
  const auto parts = microbatches();
  auto* function = jit::tryToGraphFunction(code);
  if (rows < 1 || parts < 2 || !function
      || !fixes_size(*function->graph(), rows * parts))
    return {};
  return fmt::format(
    "; its code has the size {0} as a number, and a batch has {0} rows, but a "
    "microbatch {1}: export it with sizes of its inputs, x.size(0) or -1, or "
    "trace it with {1} rows",
    rows * parts, rows);
}

} // namespace

jit::Function& body_of(const iv::Object& self, const std::string& method) {
  auto type = self.type();
  if (auto* f = type->findMethod(std::string{kept_prefix} + method))
    return *f;
  if (auto* f = type->findMethod(method))
    return *f;
  throw error{error_code::protocol, "a module of class " + self.name()
                                      + " has no method '" + method + "'"};
}

void run_code(jit::Function& code, jit::Stack& stack) {
  const auto rows = rows_of(stack);
  try {
    code.run(stack);
  } catch (const error&) {
    throw;
  } catch (const jit::JITException&) { // of a raise in the code
    throw;
  } catch (const std::exception& e) {
    auto remark = remark_on_rows(code, rows);
    if (remark.empty())
      throw;
    throw error{error_code::user_code, script_error_text(e.what()) + remark};
  }
}

} // namespace smp
