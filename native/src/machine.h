// What the operating system says about CPUs.
#pragma once

#include <vector>

namespace octavo {

// CPUs that this process may use, ascending; empty where the system does not tell.
std::vector<int> usable_cpus();

// Number of threads that the affinity mask and the cgroup's CPU quota allow, at least 1.
int usable_threads();

// Keeps the calling thread on one CPU; does nothing where the system cannot.
void pin_this_thread(int cpu);

}  // namespace octavo
