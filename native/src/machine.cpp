#include "machine.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <string>
#include <thread>

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#endif

namespace octavo {

namespace {

// CPUs worth of time that one cgroup grants; infinity if it sets no limit.
double quota_v2(const std::string& folder) {
  std::ifstream file(folder + "/cpu.max");
  std::string text;
  double period = 0;
  if (file >> text >> period && period > 0)
    if (const double quota = std::strtod(text.c_str(), nullptr); quota > 0)  // not "max"
      return quota / period;
  return HUGE_VAL;
}

double quota_v1(const std::string& folder) {
  std::ifstream quota_file(folder + "/cpu.cfs_quota_us");
  std::ifstream period_file(folder + "/cpu.cfs_period_us");
  double quota = -1, period = 0;
  if (quota_file >> quota && period_file >> period && quota > 0 && period > 0)
    return quota / period;
  return HUGE_VAL;
}

// The tightest quota of this process's cgroup and those around it. In a container the root it sees
// is its own; a service of the host finds its limit further down.
double cgroup_quota(const std::string& root, const std::string& memberships_path) {
  double least = std::min(quota_v2(root), quota_v1(root + "/cpu"));
  std::ifstream memberships(memberships_path);
  for (std::string line; std::getline(memberships, line);) {
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const bool is_v2 = controllers.empty();
    if (!is_v2 && ("," + controllers + ",").find(",cpu,") == std::string::npos) continue;
    for (std::string path = line.substr(second + 1); path.size() > 1;
         path.resize(path.find_last_of('/')))
      least = std::min(least, is_v2 ? quota_v2(root + path) : quota_v1(root + "/cpu" + path));
  }
  return least;
}

}  // namespace

std::vector<int> usable_cpus() {
  std::vector<int> cpus;
#if defined(__linux__)
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) == 0)
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu)
      if (CPU_ISSET(cpu, &set)) cpus.push_back(cpu);
#endif
  return cpus;
}

int usable_threads(const std::string& cgroups, const std::string& memberships) {
  const std::vector<int> cpus = usable_cpus();
  int count = cpus.empty() ? static_cast<int>(std::thread::hardware_concurrency())
                           : static_cast<int>(cpus.size());
  const double quota = cgroup_quota(cgroups, memberships);
  if (quota < count) count = static_cast<int>(std::floor(quota));
  return std::max(1, count);
}

void pin_this_thread(int cpu) {
#if defined(__linux__)
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(cpu, &set);
  pthread_setaffinity_np(pthread_self(), sizeof set, &set);
#else
  (void)cpu;
#endif
}

}  // namespace octavo
