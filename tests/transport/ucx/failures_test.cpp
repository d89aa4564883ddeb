#include "tests/support/catch.hpp"

#include "transport/ucx/failures.hpp"

#include <string>

using namespace smp;
using namespace smp::ucx;

TEST_CASE("only what says that a rank is gone is the loss of a rank",
          "[transport][ucx]") {
  using enum error_code;
  auto [status, code] = GENERATE(
    table<ucs_status_t, error_code>({{UCS_ERR_CANCELED, rank_down},
                                     {UCS_ERR_CONNECTION_RESET, rank_down},
                                     {UCS_ERR_ENDPOINT_TIMEOUT, rank_down},
                                     {UCS_ERR_NOT_CONNECTED, rank_down},
                                     {UCS_ERR_IO_ERROR, rank_down},
                                     {UCS_ERR_UNREACHABLE, rank_down},
                                     {UCS_ERR_REJECTED, rank_down},
                                     {UCS_ERR_TIMED_OUT, rank_down},
                                     {UCS_ERR_SHMEM_SEGMENT, rank_down},
                                     {UCS_ERR_NO_MEMORY, transport},
                                     {UCS_ERR_NO_RESOURCE, transport},
                                     {UCS_ERR_UNSUPPORTED, transport},
                                     {UCS_ERR_MESSAGE_TRUNCATED, internal},
                                     {UCS_ERR_INVALID_PARAM, internal}}));
  auto at = GENERATE(during::sending, during::receiving);
  auto x = failure_of(status, rank_id{3}, at);
  INFO(x.describe());
  CHECK(x.code == code);
  CHECK(x.rank == rank_id{3});
  CHECK_THAT(x.text, Catch::Matchers::EndsWith(ucs_status_string(status)));
  CHECK(x.text.starts_with("connection lost") == (code == rank_down));
}

TEST_CASE("whatever ends a connection is the loss of a rank",
          "[transport][ucx]") {
  auto status = GENERATE(UCS_ERR_CONNECTION_RESET, UCS_ERR_NO_MEMORY,
                         UCS_ERR_INVALID_PARAM);
  CHECK(
    failure_of(status, rank_id{3}, during::nothing)
    == failure{error_code::rank_down,
               rank_id{3},
               {},
               std::string{"connection lost: "} + ucs_status_string(status)});
}

TEST_CASE("a failure of UCX says what went on", "[transport][ucx]") {
  auto text = [](ucs_status_t x, during at) {
    auto result = failure_of(x, rank_id{1}, at).text;
    return result.substr(0, result.rfind(": "));
  };
  using enum during;
  CHECK(text(UCS_ERR_CONNECTION_RESET, nothing) == "connection lost");
  CHECK(text(UCS_ERR_CONNECTION_RESET, sending) == "connection lost");
  CHECK(text(UCS_ERR_CONNECTION_RESET, receiving)
        == "connection lost in the middle of a message");
  CHECK(text(UCS_ERR_NO_MEMORY, sending) == "cannot be sent to");
  CHECK(text(UCS_ERR_NO_MEMORY, receiving)
        == "what it sends cannot be received");
}
