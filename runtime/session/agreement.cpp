#include "runtime/session/agreement.hpp"

#include "runtime/base/rank_context.hpp"
#include "transport/exchange.hpp"

#include <exception>

namespace smp {

payload agree_on_payload(const rank_context& rank, const std::string& name,
                         const std::function<payload()>& decide) {
  using verdict = std::variant<payload, failure>;
  auto& pipeline = rank.pipeline();
  payload told;
  if (rank.pp_rank() == 0) {
    verdict decided;
    try {
      decided = decide();
    } catch (const error& err) {
      decided = err.cause();
    } catch (const std::exception& err) {
      decided = failure{error_code::user_code, no_rank, {}, err.what()};
    }
    told = to_payload(decided);
  }
  told = rank.exchange().broadcast(pipeline, name, pipeline.front(),
                                   std::move(told));
  auto result = from_payload<verdict>(told, "decision");
  if (auto* refused = std::get_if<failure>(&result))
    throw error{*refused};
  return std::get<payload>(std::move(result));
}

} // namespace smp
