#include "tests/support/assertion_lock.hpp"

#include <catch2/catch_session.hpp>
#include <catch2/catch_test_case_info.hpp>
#include <catch2/reporters/catch_reporter_event_listener.hpp>
#include <catch2/reporters/catch_reporter_helpers.hpp>
#include <catch2/reporters/catch_reporter_registrars.hpp>
#include <catch2/reporters/catch_reporter_streaming_base.hpp>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>

namespace {

/// All cases of a file are one ctest. If it is ended because a case hangs, one
/// wants to know which, so each says its name when it begins; and if only some
/// were skipped, ctest says nothing of them.
class case_reporter : public Catch::StreamingReporterBase {
public:
  using StreamingReporterBase::StreamingReporterBase;

  static std::string getDescription() {
    return "Names each case as it begins, with its seconds when it ends";
  }

  void testCaseStarting(const Catch::TestCaseInfo& info) override {
    StreamingReporterBase::testCaseStarting(info);
    m_stream << "case: " << info.name << std::flush;
    begin_ = clock::now();
    skipped_.clear();
  }

  void assertionEnded(const Catch::AssertionStats& x) override {
    if (x.assertionResult.getResultType() != Catch::ResultWas::ExplicitSkip)
      return;
    skipped_ = "no reason given";
    for (auto& info : x.infoMessages)
      if (info.type == Catch::ResultWas::ExplicitSkip)
        skipped_ = info.message;
  }

  void testCaseEnded(const Catch::TestCaseStats& stats) override {
    StreamingReporterBase::testCaseEnded(stats);
    std::chrono::duration<double> seconds = clock::now() - begin_;
    m_stream << " (" << Catch::getFormattedDuration(seconds.count()) << " s)\n";
    if (!skipped_.empty())
      m_stream << "skipped: " << stats.testInfo->name << ": " << skipped_
               << '\n';
    m_stream << std::flush;
  }

private:
  using clock = std::chrono::steady_clock;

  clock::time_point begin_;
  std::string skipped_;
};

CATCH_REGISTER_REPORTER("cases", case_reporter)

/// Catch2 3.7 counts assertions without a lock: two ranks of a virtual world
/// that assert at the same time abort it, once in a thousand runs. So the first
/// unlocked assertion outside of the thread of the cases ends the program.
class thread_guard : public Catch::EventListenerBase {
public:
  using EventListenerBase::EventListenerBase;

  void assertionStarting(const Catch::AssertionInfo& x) override {
    if (std::this_thread::get_id() == cases_
        || smp::test::assertion_lock::held())
      return;
    std::fprintf(stderr,
                 "%s:%zu: asserts on another thread than the case, without an"
                 " assertion_lock\n",
                 x.lineInfo.file, x.lineInfo.line);
    std::_Exit(EXIT_FAILURE);
  }

private:
  std::thread::id cases_ = std::this_thread::get_id();
};

CATCH_REGISTER_LISTENER(thread_guard)

} // namespace

// Tests of a folder are one program; ctest asks for those of one file by its
// name as a tag.
int main(int argc, char** argv) {
  Catch::Session session;
  session.configData().filenamesAsTags = true;
  return session.run(argc, argv);
}
