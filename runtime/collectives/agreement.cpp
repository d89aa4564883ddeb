#include "runtime/collectives/agreement.hpp"

#include "partition/rank_layout.hpp"
#include "runtime/base/rank_context.hpp"
#include "transport/exchange.hpp"

#include <exception>
#include <utility>
#include <variant>

namespace smp {

namespace {

/// Catches every exception of `f`: waiting ranks must learn of the failure.
/// @param who the rank to blame if the exception is no `error`
/// @returns why it ended; empty if it returned
failure failure_in(const std::function<void()>& f, rank_id who) {
  try {
    f();
  } catch (const error& err) {
    return err.cause();
  } catch (const std::exception& err) {
    return {error_code::user_code, who, {}, err.what()};
  } catch (...) {
    return {error_code::user_code,
            who,
            {},
            "an exception that does not derive from std::exception"};
  }
  return {};
}

} // namespace

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
    if (auto why = failure_in([&] { decided = decide(); }, no_rank))
      decided = std::move(why);
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
  auto mine = failure_in(f, rank.self());
  for (auto& x :
       rank.exchange().all_gather(world_of(rank), name, to_payload(mine)))
    if (auto first = from_payload<failure>(x, "end of what all ranks do"))
      throw error{first};
}

} // namespace smp
