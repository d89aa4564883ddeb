#include "tests/support/catch.hpp"

#include "apps/report/run_files.hpp"
#include "apps/report/run_source.hpp"
#include "tests/support/error_of.hpp"
#include "tests/support/scratch_dir.hpp"
#include "transport/error.hpp"

#include <fmt/format.h>

#include <string>

using namespace smp::app;
using Catch::Matchers::ContainsSubstring;
using smp::test::error_of;
using smp::test::scratch_dir;

namespace {

std::string steps(int count) {
  std::string result;
  for (int i = 1; i <= count; ++i)
    result += fmt::format(R"({{"step":{},"loss":{},"step_seconds":0.5,)"
                          R"("samples_per_second":8.0}})"
                          "\n",
                          i, 1.0 / i);
  return result;
}

} // namespace

TEST_CASE("The last whole line of metrics.jsonl counts", "[apps][report]") {
  scratch_dir dir;
  dir.write("metrics.jsonl", steps(3000) + R"({"step":3001,"lo)");
  dir.write("config.toml",
            "[train]\nsteps = 4000\n[data]\ntype = \"text\"\n"
            "sequence_length = 16\n");
  auto x = read_run_files(dir.path);
  CHECK(x.found);
  REQUIRE(x.last);
  CHECK(x.last->step == 3000);
  CHECK(x.last->loss == Catch::Approx(1.0 / 3000));
  CHECK(x.last->step_seconds == Catch::Approx(0.5));
  CHECK(x.steps == 4000);
  CHECK(x.tokens_per_sample == 16);
  CHECK_FALSE(x.finished());
  CHECK_FALSE(x.exit_code);
  CHECK(progress_text(x) == "step 3000/4000, loss 0.0003");
  // Of a thousand ranks on devices a line is long.
  auto numbers = std::string(100'000, ' ');
  dir.write("metrics.jsonl",
            steps(3000) + R"({"step":3001)" + numbers + "}\n" + numbers);
  CHECK(read_run_files(dir.path).last->step == 3001);
}

TEST_CASE("What a restart lost does not count", "[apps][report]") {
  scratch_dir dir;
  const std::string restart = R"({"restart":1,"at_step":8,"from_step":4,)"
                              R"("cause":"\"step\":9"})"
                              "\n";
  dir.write("metrics.jsonl", steps(7) + restart);
  auto x = read_run_files(dir.path);
  REQUIRE(x.last);
  CHECK(x.last->step == 4);
  CHECK(x.last->loss == 0.25);
  dir.write("metrics.jsonl", steps(7) + restart + steps(5));
  CHECK(read_run_files(dir.path).last->step == 5);
  dir.write("metrics.jsonl",
            R"({"restart":1,"at_step":1,"from_step":0,"cause":"x"})"
            "\n");
  CHECK_FALSE(read_run_files(dir.path).last);
  dir.write("end.json", R"({"exit_code":0,"cause":"","restarts":2})");
  CHECK(read_run_files(dir.path).restarts == 2);
}

TEST_CASE("Samples of all data that are sequences count as tokens",
          "[apps][report]") {
  scratch_dir dir;
  for (std::string type : {"tokens", "synthetic"}) {
    dir.write("config.toml",
              "[data]\ntype = \"" + type + "\"\nsequence_length = 16\n");
    CHECK(read_run_files(dir.path).tokens_per_sample == 16);
  }
  dir.write("config.toml", "[data]\ntype = \"safetensors\"\n");
  CHECK(read_run_files(dir.path).tokens_per_sample == 0);
}

TEST_CASE("A loss that is not a number is none", "[apps][report]") {
  scratch_dir dir;
  dir.write("metrics.jsonl", "{\"step\":7,\"loss\":null,\"step_seconds\":1}\n");
  auto x = read_run_files(dir.path);
  REQUIRE(x.last);
  CHECK_FALSE(x.last->loss);
  CHECK(progress_text(x) == "step 7");
}

TEST_CASE("What is broken in a run directory is left out", "[apps][report]") {
  scratch_dir dir;
  CHECK_FALSE(read_run_files(dir.path).found);
  CHECK_FALSE(read_run_files(dir.path / "nowhere").found);
  dir.write("metrics.jsonl", "\n[]\n{\"step\":\"x\"}\n\xff\xfe\n");
  dir.write("config.toml", "[train\nsteps = ");
  dir.write("end.json", "{\"exit_code\": \"none\"}");
  auto x = read_run_files(dir.path);
  CHECK_FALSE(x.last);
  CHECK_FALSE(x.exit_code);
  CHECK_FALSE(x.found);
  dir.write("end.json", R"({"exit_code": 3, "cause": null})");
  CHECK(read_run_files(dir.path).exit_code == 3);
  CHECK(read_run_files(dir.path).cause.empty());
}

TEST_CASE("A run that is over tells how it ended", "[apps][report]") {
  scratch_dir dir;
  dir.write("metrics.jsonl", steps(4));
  dir.write("config.toml", "[train]\nsteps = 4\n");
  run_source source{dir.path};
  auto done = source.look();
  CHECK(done.what == run_look::state::ended);
  CHECK(done.text == "the run is done after step 4/4, loss 0.2500");
  CHECK(problems_of(done).empty());
  dir.write("end.json", R"({"exit_code": 3, "cause": "rank 1: killed"})");
  CHECK(source.look().text
        == "the run ended with exit code 3 after step 4/4, loss 0.2500: rank "
           "1: killed");
}

TEST_CASE("Of a run without steps nobody says that it did not get to one",
          "[apps][report]") {
  scratch_dir dir;
  dir.write("log-0.txt", "hello\n");
  dir.write("end.json", R"({"exit_code": 0, "cause": ""})");
  run_source source{dir.path};
  CHECK(source.look().text == "the run ended with exit code 0");
  // smp-train says how many there are to be.
  dir.write("config.toml", "[train]\nsteps = 4\n");
  CHECK(source.look().text
        == "the run ended with exit code 0 before the end of its first step");
}

TEST_CASE("What is neither a run directory nor an address is refused",
          "[apps][report]") {
  scratch_dir dir;
  auto why = [](const std::string& place, const std::string& secret = {}) {
    return error_of([&] { run_source(place, secret); },
                    smp::error_code::config);
  };
  CHECK_THAT(why(dir.path), ContainsSubstring("not a run directory"));
  CHECK_THAT(why("nowhere"), ContainsSubstring("neither a directory nor"));
  CHECK_THAT(why("host:0"), ContainsSubstring("neither a directory nor"));
  CHECK_THAT(why("host:65536"), ContainsSubstring("neither a directory nor"));
  CHECK_THAT(why("[::1]:7"), ContainsSubstring("--secret FILE"));
  CHECK_THAT(why("host:7", dir.path / "none"), ContainsSubstring("be read"));
}
