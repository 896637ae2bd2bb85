#include "pool.h"

#include <algorithm>
#include <chrono>
#include <stdexcept>

#include "machine.h"

#include <unistd.h>

#if defined(__linux__)
#include <sched.h>
#endif

namespace octavo {

namespace {

// How long it does so until it sleeps. Only a CPU that is idle makes the system move others there,
// from where they are in a worker's way.
constexpr auto kYielding = std::chrono::microseconds(300);

// Waits until `value` is no longer `old`; whoever changes it must notify, and change it in the order
// of seq_cst: `notify_all` asks whether anyone sleeps, and a weaker store may still be on its way
// when it does, unseen by a thread that goes to sleep just then.
template <typename T>
void wait_for_change(const std::atomic<T>& value, T old) {
  Patience patience;
  while (!patience.is_out()) {
    if (value.load(std::memory_order_acquire) != old) return;
    patience.wait();
  }
  const auto until = std::chrono::steady_clock::now() + kYielding;
  do {
    if (value.load(std::memory_order_acquire) != old) return;
    patience.wait();
  } while (std::chrono::steady_clock::now() < until);
  value.wait(old, std::memory_order_acquire);
}

}  // namespace

void Patience::wait() {
  if (is_out()) return std::this_thread::yield();
  --spins_;
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

void Barrier::wait() {
  if (threads_ == 1) return;
  const unsigned generation = generation_.load(std::memory_order_acquire);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == threads_) {
    arrived_.store(0, std::memory_order_relaxed);
    generation_.store(generation + 1, std::memory_order_seq_cst);
    generation_.notify_all();
    return;
  }
  wait_for_change(generation_, generation);
}

Pool::Pool(int threads, std::vector<int> cpus, bool pin_caller)
    : threads_(threads),
      caller_cpu_(pin_caller && !cpus.empty() ? cpus[0] : -1),
      barrier_(threads),
      process_(getpid()) {
  try {
    for (int thread = 1; thread < threads; ++thread) {
      const int cpu = thread < static_cast<int>(cpus.size()) ? cpus[thread] : -1;
      workers_.emplace_back([this, thread, cpu] { work(thread, cpu); });
    }
  } catch (...) {
    stop();
    throw;
  }
}

Pool::~Pool() { stop(); }

bool Pool::is_forked() const { return !workers_.empty() && getpid() != process_; }

void Pool::stop() {
  if (is_forked()) {  // there is nobody to wait for
    for (std::thread& worker : workers_) worker.detach();
    return;
  }
  stopping_.store(true, std::memory_order_release);
  ticket_.fetch_add(1, std::memory_order_seq_cst);
  ticket_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void Pool::run(const Job& job) {
  thread_local int pinned_to = -1;
  if (pinned_to != caller_cpu_ && caller_cpu_ >= 0) {
    pin_this_thread(caller_cpu_);
    pinned_to = caller_cpu_;
  }
  run_unpinned(job);
}

void Pool::run_unpinned(const Job& job) {
  if (is_forked())
    throw std::runtime_error(
        "This process was forked off one that had loaded a model, and the threads stayed there; "
        "load the model after the fork.");
  std::lock_guard<std::mutex> lock(running_);
  job_ = &job;
  busy_.store(threads_ - 1, std::memory_order_relaxed);
  ticket_.fetch_add(1, std::memory_order_seq_cst);
  ticket_.notify_all();
  job(0);
  for (int busy = busy_.load(std::memory_order_acquire); busy != 0;
       busy = busy_.load(std::memory_order_acquire))
    wait_for_change(busy_, busy);
}

void Pool::for_each(int64_t count, int64_t chunk,
                    const std::function<void(int64_t, int64_t)>& body) {
  std::atomic<int64_t> next{0};
  run_unpinned([&](int) {
    for (;;) {
      const int64_t begin = next.fetch_add(chunk, std::memory_order_relaxed);
      if (begin >= count) return;
      body(begin, std::min(count, begin + chunk));
    }
  });
}

void Pool::work(int thread, int cpu) {
  if (cpu >= 0) pin_this_thread(cpu);
  unsigned seen = 0;
  for (;;) {
    wait_for_change(ticket_, seen);
    ++seen;
    if (stopping_.load(std::memory_order_acquire)) return;
    (*job_)(thread);
    busy_.fetch_sub(1, std::memory_order_seq_cst);
    busy_.notify_all();
  }
}

}  // namespace octavo
