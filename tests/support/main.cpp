#include <catch2/catch_session.hpp>

// Tests of a folder are one program; ctest asks for those of one file by its
// name as a tag, to give them their properties.
int main(int argc, char** argv) {
  Catch::Session session;
  session.configData().filenamesAsTags = true;
  return session.run(argc, argv);
}
