// ctest: seconds=45 label=proof

#include "tests/support/catch.hpp"

#include "tests/support/markdown.hpp"
#include "tests/support/runs/installed.hpp"
#include "tests/support/runs/printed_losses.hpp"
#include "tests/support/runs/program.hpp"
#include "tests/support/scratch_dir.hpp"

using namespace smp::test;

// A stranger has the installed smp and a project of their own, which says
// nothing that README does not say.
TEST_CASE_METHOD(scratch_dir, "the example builds in a stranger's project",
                 "[apps][examples][install]") {
  installed_smp installed{path};
  auto readme = content_of(source_file("README.md"));
  write("project/train_own_model.cpp",
        code_block(readme, "Your own model", "cpp"));
  // As docs/inspect.md has it.
  write("project/look.cpp",
        "#include \"smp/smp.hpp\"\n"
        "void look(smp::session& session) {\n"
        "  smp::inspectable_run looked_at{session, \"runs/mine\"};\n"
        "}\n");
  // Without the precompiled header, smp comes before Torch.
  write("project/CMakeLists.txt",
        code_block(readme, "Your own model", "cmake")
          + "add_library(smp_first OBJECT train_own_model.cpp look.cpp)\n"
            "target_link_libraries(smp_first PRIVATE smp::smp)\n"
            "target_compile_options(smp_first PRIVATE -fsyntax-only)\n");
  installed.build("project");
  CHECK(
    learned(installed.run({"project/build/train_own_model", "--ranks", "2"})));
}
