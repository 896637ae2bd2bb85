// Threads that work on one step together: they spin while it runs, and sleep if none follows soon.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace octavo {

// How a thread waits between two looks at what it waits for: 2,000 times without giving up its CPU, some 100
// microseconds on x86, then it lets others run. Phases of a step end closer together than that: whoever waits
// longer shares its CPU with what it waits for, or waits for a thread that the server's event loop keeps from
// its CPU, or for the next step.
class Patience {
 public:
  void wait();
  bool is_out() const { return spins_ == 0; }

 private:
  int spins_ = 2000;
};

// Meeting point of all threads of a pool. Everything written before it is seen after it.
class Barrier {
 public:
  explicit Barrier(int threads) : threads_(threads) {}
  void wait();

 private:
  const int threads_;
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<unsigned> generation_{0};
};

class Pool {
 public:
  using Job = std::function<void(int thread)>;

  // `cpus` pins worker i to cpus[i]; empty: the workers float. The calling thread of `run` is
  // thread 0 and belongs to the caller: it is pinned to cpus[0] only if `pin_caller`.
  // Throws std::system_error if the system starts no more threads.
  Pool(int threads, std::vector<int> cpus, bool pin_caller = false);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int threads() const { return threads_; }
  Barrier& barrier() { return barrier_; }

  // Runs `job` on every thread and returns when all are done. Calls from several threads queue.
  // A job must not throw. Throws std::runtime_error in a process that was forked off the pool's.
  void run(const Job& job);

  // Splits [0, count) into chunks that threads claim one after the other. Never pins the caller.
  void for_each(int64_t count, int64_t chunk, const std::function<void(int64_t, int64_t)>& body);

 private:
  void run_unpinned(const Job& job);
  void work(int thread, int cpu);
  void stop();
  bool is_forked() const;

  const int threads_;
  const int caller_cpu_;  // -1: not pinned
  Barrier barrier_;
  std::mutex running_;
  const Job* job_ = nullptr;
  alignas(64) std::atomic<unsigned> ticket_{0};  // grows with each job, and at the end
  alignas(64) std::atomic<int> busy_{0};
  std::atomic<bool> stopping_{false};
  const int process_;  // in which the workers are
  std::vector<std::thread> workers_;
};

}  // namespace octavo
