#include "isa.h"

#include <utility>

#include "kernel_table.h"

#if defined(__linux__) && defined(__x86_64__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
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
namespace amx { const KernelTable& table(); }
namespace neon { const KernelTable& table(); }

namespace {

struct Choice {
  const char* name;
  const KernelTable& (*table)();
  bool runs_here;
  bool comes_later = false;  // slower here than the one behind it
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

// Products of bfloat16 take two cycles on Intel's cores, so those of floats are twice as fast.
[[maybe_unused]] bool has_slow_bfloats() { return __builtin_cpu_is("intel"); }

struct Leaf { unsigned eax, ebx, ecx, edx; };
Leaf cpuid_7(unsigned subleaf) {
  Leaf leaf{7, 0, subleaf, 0};
  __asm__("cpuid" : "+a"(leaf.eax), "=b"(leaf.ebx), "+c"(leaf.ecx), "=d"(leaf.edx));
  return leaf;
}

// gcc 12's __builtin_cpu_supports knows neither AVX-VNNI nor AMX.
bool has_avxvnni() { return has_avx2() && (cpuid_7(1).eax >> 4 & 1); }

// Linux grants a process the registers of matrices on demand, and keeps room for them then wherever it
// keeps a thread's other registers.
[[maybe_unused]] bool has_amx() {
#if defined(__linux__)
  constexpr long kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  constexpr unsigned kBfloats = 1u << 22, kTiles = 1u << 24;
  static const bool is_granted = (cpuid_7(0).edx & kBfloats) && (cpuid_7(0).edx & kTiles) &&
                                 syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
  return has_avx512bf16() && is_granted;
#else
  return false;
#endif
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
#if defined(OCTAVO_WITH_AMX) && !defined(OCTAVO_EMULATE_AVX512)
      {"amx", amx::table, has_amx()},
#endif
#if defined(OCTAVO_WITH_AVX512BF16)
      {"avx512bf16", avx512bf16::table, has_avx512bf16(), has_slow_bfloats()},
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
      {"amx-emulated", amx::table, has_avx2()},
#endif
  };
}

}  // namespace

std::vector<std::string> available_isas() {
  std::vector<Choice> all = choices();
  for (size_t i = 0; i + 1 < all.size(); ++i)
    if (all[i].comes_later) std::swap(all[i], all[i + 1]), ++i;
  std::vector<std::string> names;
  for (const Choice& choice : all)
    if (choice.runs_here) names.push_back(choice.name);
  return names;
}

const KernelTable* kernels_of(const std::string& name) {
  for (const Choice& choice : choices())
    if (choice.runs_here && name == choice.name) return &choice.table();
  return nullptr;
}

}  // namespace octavo
