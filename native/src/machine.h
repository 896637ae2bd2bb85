// What the operating system says about CPUs.
#pragma once

#include <string>
#include <vector>

namespace octavo {

// CPUs that this process may use, ascending; empty where the system does not tell.
std::vector<int> usable_cpus();

// Number of threads that the affinity mask and the CPU quotas of the process's cgroups allow, at
// least 1. `cgroups` is where they are mounted, and the file `memberships` names the process's.
int usable_threads(const std::string& cgroups, const std::string& memberships);

// Keeps the calling thread on one CPU; does nothing where the system cannot.
void pin_this_thread(int cpu);

}  // namespace octavo
