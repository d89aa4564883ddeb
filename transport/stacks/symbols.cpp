#include "transport/stacks/symbols.hpp"

#include "transport/files/file_descriptor.hpp"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <system_error>
#include <utility>
#include <vector>

#include <cxxabi.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <link.h>
#include <unistd.h>

namespace smp {

namespace {

using elf_header = ElfW(Ehdr);
using elf_section = ElfW(Shdr);
using elf_symbol = ElfW(Sym);

/// Sorted by offset.
using frames_of_library = std::vector<stack_frame*>;

std::string demangled(const char* x) {
  int status = 0;
  std::unique_ptr<char, void (*)(void*)> result{
    abi::__cxa_demangle(x, nullptr, nullptr, &status), std::free};
  return status == 0 ? result.get() : x;
}

/// A file with code. Nothing of it is trusted.
class code_file {
public:
  explicit code_file(const char* path)
    : file_(::open(path, O_RDONLY | O_CLOEXEC)) {
    // nop
  }

  /// Whether it is what lies in memory, and no later build: of two builds, the
  /// first page, with the tables and the build id, differs.
  /// @param memory of this process: a library may be unloaded meanwhile
  bool is_at(const file_descriptor& memory, const void* address) const {
    std::array<std::byte, 4096> page{};
    auto loaded = page;
    return read(page.data(), page.size(), 0)
           && ::pread(memory.get(), loaded.data(), loaded.size(),
                      reinterpret_cast<intptr_t>(address))
                == static_cast<ssize_t>(loaded.size())
           && page == loaded;
  }

  /// Those that have no name yet.
  void name(const frames_of_library& frames) const {
    elf_header header{};
    if (!read(&header, sizeof(header), 0)
        || std::memcmp(header.e_ident, ELFMAG, SELFMAG) != 0
        || header.e_shentsize != sizeof(elf_section))
      return;
    std::vector<elf_section> sections(header.e_shnum);
    if (!read(sections.data(), sections.size() * sizeof(elf_section),
              header.e_shoff))
      return;
    // All functions, if the file has not been stripped; what it exports.
    for (auto type : {SHT_SYMTAB, SHT_DYNSYM})
      for (auto& x : sections)
        if (x.sh_type == static_cast<uint32_t>(type)
            && x.sh_link < sections.size())
          name(frames, x, sections[x.sh_link]);
  }

private:
  bool read(void* to, size_t size, uint64_t at) const {
    return ::pread(file_.get(), to, size, static_cast<off_t>(at))
           == static_cast<ssize_t>(size);
  }

  void name(const frames_of_library& frames, const elf_section& table,
            const elf_section& strings) const {
    std::vector<elf_symbol> part;
    const auto count = table.sh_size / sizeof(elf_symbol);
    for (uint64_t begin = 0; begin < count; begin += part.size()) {
      part.resize(std::min<uint64_t>(count - begin, 4096));
      if (!read(part.data(), part.size() * sizeof(elf_symbol),
                table.sh_offset + begin * sizeof(elf_symbol)))
        return;
      for (auto& x : part)
        if (ELF64_ST_TYPE(x.st_info) == STT_FUNC && x.st_shndx != SHN_UNDEF)
          name(frames, x, strings);
    }
  }

  void name(const frames_of_library& frames, const elf_symbol& x,
            const elf_section& strings) const {
    auto i = std::ranges::lower_bound(frames, x.st_value, {},
                                      [](auto* y) { return y->offset; });
    for (; i != frames.end() && (*i)->offset - x.st_value < x.st_size; ++i)
      if ((*i)->function.empty())
        (*i)->function = demangled(name_at(strings, x.st_name).c_str());
  }

  std::string name_at(const elf_section& strings, uint64_t at) const {
    std::string result;
    std::array<char, 256> part{};
    // It ends somewhere: no name is longer than a section.
    while (at < strings.sh_size && result.find('\0') == result.npos) {
      auto size = std::min<uint64_t>(part.size(), strings.sh_size - at);
      if (!read(part.data(), size, strings.sh_offset + at))
        break;
      result.append(part.data(), size);
      at += size;
    }
    return result;
  }

  file_descriptor file_;
};

/// The frames of one library.
struct used_library {
  const void* begin = nullptr;
  bool is_program = false;
  frames_of_library frames;
};

} // namespace

std::map<uintptr_t, stack_frame>
frames_at(const std::set<uintptr_t>& addresses) {
  std::error_code ignored;
  const auto program = std::filesystem::read_symlink("/proc/self/exe", ignored)
                         .string();
  std::map<uintptr_t, stack_frame> result;
  std::map<std::string, used_library> libraries;
  for (auto address : addresses) {
    auto& frame = result[address];
    frame.offset = address;
    dl_find_object object{};
    if (::_dl_find_object(reinterpret_cast<void*>(address), &object) != 0)
      continue;
    auto& map = *object.dlfo_link_map;
    const bool is_program = *map.l_name == '\0';
    frame.library = is_program ? program : map.l_name;
    frame.offset = address - map.l_addr;
    auto& library = libraries[frame.library];
    library.begin = object.dlfo_map_start;
    library.is_program = is_program;
    library.frames.push_back(&frame);
  }
  file_descriptor memory{::open("/proc/self/mem", O_RDONLY | O_CLOEXEC)};
  for (auto& [path, library] : libraries) {
    code_file file{library.is_program ? "/proc/self/exe" : path.c_str()};
    if (file.is_at(memory, library.begin))
      file.name(library.frames);
  }
  return result;
}

} // namespace smp
