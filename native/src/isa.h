// The instruction sets that kernels are compiled for, and which of them this CPU has.
#pragma once

#include <string>
#include <vector>

namespace octavo {

struct KernelTable;

// Names of the compiled sets that this CPU can run, fastest first; "portable" is always the last.
std::vector<std::string> available_isas();

// Kernels of a set by name; null if it is unknown or cannot run here.
const KernelTable* kernels_of(const std::string& name);

}  // namespace octavo
