#include "tests/support/catch.hpp"

#include "apps/report/stack_report.hpp"

#include <algorithm>
#include <sstream>
#include <string>
#include <vector>

using namespace smp;
using namespace smp::app;

TEST_CASE("The name of a function is cut to what tells it from others",
          "[apps][report]") {
  struct row {
    std::string whole, cut;
  };
  auto x = GENERATE(values<row>({
    {"main", "main"},
    {"smp::now()", "smp::now()"},
    {"f(std::vector<int, std::allocator<int> >&, long)", "f(..)"},
    {"a::b<c<d>, e>::f(int) const", "a::b<..>::f(..) const"},
    {"(anonymous namespace)::net::forward(at::Tensor)",
     "(anonymous namespace)::net::forward(..)"},
    {"x::operator()(int)", "x::operator()(..)"},
    {"operator<< <char>(std::ostream&)", "operator<< <..>(..)"},
    {"bool operator< <int>(a<int>)", "bool operator< <..>(..)"},
    {"q<&a::operator< >::f(int)", "q<..>::f(..)"},
    {"g<(e)1, void (*)(int)>(int)", "g<..>(..)"},
    {"unbalanced<", "unbalanced<..>"},
  }));
  CHECK(short_function(x.whole, 72) == x.cut);
  CHECK(short_function("0123456789abcdefghijklmnopqrstuvwxyz", 20)
        == "012345..opqrstuvwxyz");
}

TEST_CASE("Stacks fit into 80 columns, and are whole in JSON",
          "[apps][report]") {
  thread_stack thread;
  thread.ids = {7};
  thread.name = "python";
  thread.state = "running";
  thread.cpu_seconds = 1.5;
  thread.script = {"File \"x.py\", line 3 in f"};
  const auto name = "long::" + std::string(200, 'n') + "(int)";
  thread.frames = {{name, "/somewhere/libx.so", 16},
                   {"", "/somewhere/libx.so", 32},
                   {"", "", 48}};
  process_stacks rank{rank_id{1}, 7, "host", "", {thread}};
  thread.ids = {8, 9};
  thread.frames.clear();
  thread.script.clear();
  thread.problem = "did not answer";
  rank.threads.push_back(thread);
  std::vector<process_stacks> ranks{rank};
  auto text = stack_text(ranks);
  std::istringstream lines{text};
  for (std::string line; std::getline(lines, line);)
    CHECK(line.size() <= 80);
  auto says = [&](const char* x) { return text.find(x) != text.npos; };
  INFO(text);
  CHECK(says("rank 1, process 7 on host"));
  CHECK(
    says("  main thread 7 \"python\", running, 1.50 s of CPU time\n"
         "    File \"x.py\", line 3 in f\n"
         "    long::"));
  CHECK(says(" in libx.so\n    libx.so+0x20\n    0x30, in no file\n"));
  CHECK(
    says("  2 threads \"python\", running, 1.50 s of CPU time: did not "
         "answer\n"));
  auto threads = stack_json(ranks).at(0).at("threads");
  CHECK(threads.at(0).at("frames").at(0).at("function") == name);
  CHECK(threads.at(0).at("frames").at(1).at("function").is_null());
  CHECK(threads.at(0).at("frames").at(1).at("library") == "/somewhere/libx.so");
  CHECK(threads.at(0).at("python").at(0) == "File \"x.py\", line 3 in f");
  CHECK(threads.at(1).at("problem") == "did not answer");
}
