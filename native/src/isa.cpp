#include "isa.h"

#include "kernel_table.h"

#if defined(__linux__) && defined(__aarch64__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace octavo {

// Each is defined by the translation unit of that set.
namespace portable { const KernelTable& table(); }
namespace avx2 { const KernelTable& table(); }
namespace avxvnni { const KernelTable& table(); }
namespace avx512 { const KernelTable& table(); }
namespace avx512bf16 { const KernelTable& table(); }
namespace neon { const KernelTable& table(); }

namespace {

struct Choice {
  const char* name;
  const KernelTable& (*table)();
  bool runs_here;
};

#if defined(__x86_64__)
bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("f16c");
}

[[maybe_unused]] bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vnni");
}

[[maybe_unused]] bool has_avx512bf16() {
  return has_avx512() && __builtin_cpu_supports("avx512bf16");
}

// gcc 12's __builtin_cpu_supports does not know AVX-VNNI: CPUID leaf 7, subleaf 1, EAX bit 4.
bool has_avxvnni() {
  unsigned eax = 7, ebx = 0, ecx = 1, edx = 0;
  __asm__("cpuid" : "+a"(eax), "=b"(ebx), "+c"(ecx), "=d"(edx));
  return has_avx2() && (eax >> 4 & 1);
}
#endif

#if defined(OCTAVO_WITH_NEON)
bool has_neon_dotprod() {
#if defined(__linux__)
  return getauxval(AT_HWCAP) & HWCAP_ASIMDDP;
#else
  return true;  // every Apple CPU that runs 64-bit macOS
#endif
}
#endif

std::vector<Choice> choices() {
  return {
#if defined(OCTAVO_WITH_AVX512BF16)
      {"avx512bf16", avx512bf16::table, has_avx512bf16()},
#endif
#if defined(OCTAVO_WITH_AVX512) && !defined(OCTAVO_EMULATE_AVX512)
      {"avx512", avx512::table, has_avx512()},
#endif
#if defined(OCTAVO_WITH_AVXVNNI)
      {"avxvnni", avxvnni::table, has_avxvnni()},
#endif
#if defined(OCTAVO_WITH_AVX2)
      {"avx2", avx2::table, has_avx2()},
#endif
#if defined(OCTAVO_WITH_NEON)
      {"neon", neon::table, has_neon_dotprod()},
#endif
      {"portable", portable::table, true},
#if defined(OCTAVO_EMULATE_AVX512)
      {"avx512-emulated", avx512::table, has_avx2()},
#endif
  };
}

}  // namespace

std::vector<std::string> available_isas() {
  std::vector<std::string> names;
  for (const Choice& choice : choices())
    if (choice.runs_here) names.push_back(choice.name);
  return names;
}

const KernelTable* kernels_of(const std::string& name) {
  for (const Choice& choice : choices())
    if (choice.runs_here && name == choice.name) return &choice.table();
  return nullptr;
}

}  // namespace octavo
