#include "runtime/session/agreement.hpp"

#include "runtime/base/rank_context.hpp"
#include "transport/bytes.hpp"

#include <exception>

namespace smp {

payload agree(const rank_context& rank, const std::string& name,
              const std::function<payload()>& decide) {
  auto& pipeline = rank.pipeline();
  payload decision;
  failure refused;
  if (rank.pp_rank() == 0) {
    try {
      decision = decide();
    } catch (const error& err) {
      refused = err.cause();
    } catch (const std::exception& err) {
      refused = {error_code::user_code, no_rank, {}, err.what()};
    }
    byte_writer out;
    out.u8(static_cast<uint8_t>(refused.code));
    out.string(refused.module);
    out.string(refused.text);
    out.bytes(decision.bytes);
    decision.bytes = out.take();
  }
  decision = rank.exchange().broadcast(pipeline, name, pipeline.front(),
                                       std::move(decision));
  byte_reader in{decision.bytes};
  auto code = in.u8("error code");
  if (code > static_cast<uint8_t>(error_code::internal))
    in.fail("error code", "unknown");
  refused.code = static_cast<error_code>(code);
  refused.module = in.string("module");
  refused.text = in.string("error");
  if (refused)
    throw error{refused};
  decision.bytes = in.bytes("decision");
  in.expect_end();
  return decision;
}

bool agree_whether(const rank_context& rank, const std::string& name,
                   const std::function<bool()>& decide) {
  auto x = agree(rank, name, [&] {
    return payload{{std::byte{decide()}}, {}};
  });
  return byte_reader{x.bytes}.boolean("decision");
}

} // namespace smp
