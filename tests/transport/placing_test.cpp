// ctest: processors=2

#include "tests/support/catch.hpp"

#include "tests/support/actors/cluster.hpp"
#include "tests/support/actors/payloads.hpp"
#include "transport/memory/arena.hpp"
#include "transport/placing_fabric.hpp"

#include <map>
#include <mutex>
#include <string>
#include <vector>

using namespace smp;
using namespace smp::test;

#define ON_EVERY_FABRIC                                                        \
  auto kind = GENERATE(as<std::string>{}, "loopback", "shm", "tcp");           \
  CAPTURE(kind)

namespace {

/// Places what it is asked for in an arena, and notes all it hears.
struct places : tensor_places {
  std::shared_ptr<std::byte> place(const arriving_tensor& x) override {
    std::lock_guard guard{mutex};
    asked[x.transfer].push_back(x);
    return blocks.take(x.nbytes);
  }

  void placed(rank_id by, uint64_t transfer, bool as_marked) override {
    std::lock_guard guard{mutex};
    heard.push_back({by, transfer, as_marked});
    changed.notify_all();
  }

  bool wait_heard(size_t count) {
    std::unique_lock guard{mutex};
    return changed.wait_for(guard, patience,
                            [&] { return heard.size() >= count; });
  }

  struct news {
    rank_id by;
    uint64_t transfer;
    bool as_marked;
    bool operator==(const news&) const = default;
  };

  arena blocks{1 << 20};
  std::mutex mutex;
  std::condition_variable changed;
  std::map<uint64_t, std::vector<arriving_tensor>> asked;
  std::vector<news> heard;
};

struct marked_cluster {
  explicit marked_cluster(const std::string& kind)
    : ranks(kind, 2, [this](uint64_t rank, fabric& x) {
        auto& placing = dynamic_cast<placing_fabric&>(x);
        placing.register_memory(of[rank].blocks.memory(),
                                of[rank].blocks.status().capacity);
        placing.place_with(of[rank]);
      }) {
    // nop
  }

  void send(message x, std::vector<uint64_t> transfers) {
    dynamic_cast<placing_fabric&>(ranks.at(0))
      .send_marked(rank_id{1}, std::move(x), std::move(transfers),
                   ranks.heard(0).on_sent());
  }

  places of[2];
  cluster ranks;
};

} // namespace

TEST_CASE("a marked tensor lies where its receiver says, and its sender hears",
          "[transport][placing][R46]") {
  ON_EVERY_FABRIC;
  marked_cluster c{kind};
  c.send(make_message("x", {make_tensor(100000, 1), make_tensor(50000, 2),
                            make_tensor(100, 3)}),
         {17, 0, 18});
  REQUIRE(c.ranks.heard(1).wait_messages(1));
  REQUIRE(c.of[0].wait_heard(1));
  auto got = c.ranks.heard(1).take_messages()[0].second.body.tensors;
  CHECK(same_bytes(got[0], pattern(100000, 1)));
  CHECK(same_bytes(got[1], pattern(50000, 2)));
  CHECK(same_bytes(got[2], pattern(100, 3)));
  CHECK(c.of[1].blocks.contains(got[0].data));
  // Neither what has no name nor what rides in the first message.
  CHECK_FALSE(c.of[1].blocks.contains(got[1].data));
  CHECK_FALSE(c.of[1].blocks.contains(got[2].data));
  CHECK(c.of[0].heard == std::vector<places::news>{{rank_id{1}, 17, true}});
  REQUIRE(c.of[1].asked.size() == 1);
  CHECK(c.of[1].asked[17].size() == 1);
  CHECK(c.of[1].asked[17][0].from == rank_id{0});
  CHECK(c.of[1].asked[17][0].nbytes == 100000);
  CHECK(c.of[0].asked.empty());
  got.clear();
  CHECK(c.of[1].blocks.status().used == 0);
}

TEST_CASE("all of a tensor goes the way that was chosen once",
          "[transport][placing][R46]") {
  ON_EVERY_FABRIC;
  marked_cluster c{kind};
  // Too large for the arena, and sent in several chunks.
  c.send(make_message("large", {make_tensor(40 << 20, 1)}), {1});
  c.send(make_message("fits", {make_tensor(600000, 2)}), {2});
  REQUIRE(c.ranks.heard(1).wait_messages(2));
  REQUIRE(c.of[0].wait_heard(2));
  for (auto& [from, x] : c.ranks.heard(1).take_messages()) {
    auto& t = x.body.tensors[0];
    auto large = to_text(x.body.bytes) == "large";
    CHECK(same_bytes(t, large ? pattern(40 << 20, 1) : pattern(600000, 2)));
    CHECK(c.of[1].blocks.contains(t.data) == !large);
  }
  CHECK(c.of[1].asked[1].size() == 1);
  for (auto& x : c.of[0].heard)
    CHECK(x.as_marked == (x.transfer == 2));
}

TEST_CASE("marks change nothing for who does not choose",
          "[transport][placing]") {
  ON_EVERY_FABRIC;
  cluster c{kind, 2};
  dynamic_cast<placing_fabric&>(c.at(0)).send_marked(
    rank_id{1}, make_message("x", {make_tensor(100000, 1)}), {17},
    c.heard(0).on_sent());
  REQUIRE(c.heard(1).wait_messages(1));
  REQUIRE(c.heard(0).wait_sent(1));
  CHECK(same_bytes(c.heard(1).take_messages()[0].second.body.tensors[0],
                   pattern(100000, 1)));
  CHECK(c.heard(0).send_failures().empty());
}
