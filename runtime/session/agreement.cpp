#include "runtime/session/agreement.hpp"

#include "partition/rank_layout.hpp"
#include "runtime/base/rank_context.hpp"
#include "transport/exchange.hpp"

#include <exception>

namespace smp {

std::vector<rank_id> world_of(const rank_context& rank) {
  return rank.layout().members(comm_group::world, rank.self());
}

const std::vector<rank_id>& pipeline_of(const rank_context& rank) {
  return rank.pipeline();
}

payload agree_on_payload(const rank_context& rank,
                         const std::vector<rank_id>& group,
                         const std::string& name,
                         const std::function<payload()>& decide) {
  using verdict = std::variant<payload, failure>;
  payload told;
  if (rank.self() == group.front()) {
    verdict decided;
    try {
      decided = decide();
    } catch (const error& err) {
      decided = err.cause();
    } catch (const std::exception& err) {
      decided = failure{error_code::user_code, no_rank, {}, err.what()};
    } catch (...) {
      decided = failure{error_code::user_code,
                        no_rank,
                        {},
                        "an exception that is no std::exception"};
    }
    told = to_payload(decided);
  }
  told = rank.exchange().broadcast(group, name, group.front(), std::move(told));
  auto result = from_payload<verdict>(told, "decision");
  if (auto* refused = std::get_if<failure>(&result))
    throw error{*refused};
  return std::get<payload>(std::move(result));
}

void do_together(const rank_context& rank, const std::string& name,
                 const std::function<void()>& f) {
  failure mine;
  try {
    f();
  } catch (const error& err) {
    mine = err.cause();
  } catch (const std::exception& err) {
    mine = {error_code::user_code, rank.self(), {}, err.what()};
  }
  for (auto& x :
       rank.exchange().all_gather(world_of(rank), name, to_payload(mine)))
    if (auto first = from_payload<failure>(x, "end of what all ranks do"))
      throw error{first};
}

} // namespace smp
