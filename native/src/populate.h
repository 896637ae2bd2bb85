// The first touch of memory, ahead of its use and while no step runs.
//
// The kernel finds and zeroes a page when it is first touched: with huge pages, 2 MB, that takes
// 0.2 ms, and 4 ms in a virtual machine whose host hands out memory lazily. A step that comes to
// new memory waits for that, once for each page.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <thread>

namespace octavo {

// Memory that is used from its start towards its end, with a thread of its own that keeps `lead`
// bytes behind what was used so far populated. It works only after some milliseconds without a
// step (a second, before the first), stops when one begins, which so waits for one page at most,
// and sleeps if nothing is left.
//
// What lies there does not change, not even if a step writes to a page while it is touched. Where
// no thread can be made, and in a process forked off, steps touch their memory themselves.
class Populator {
 public:
  // How to let go of one. The fork of a process lacks the thread, and may hold the lock that the
  // thread had: there it is left as it is.
  struct Release {
    void operator()(Populator* populator) const {
      if (!populator->is_forked()) delete populator;
    }
  };

  // The memory must outlive this.
  Populator(uint8_t* data, size_t bytes, size_t lead);
  ~Populator();
  Populator(const Populator&) = delete;
  Populator& operator=(const Populator&) = delete;

  // Between these no page is begun; several steps may run. `used` is where the memory that this
  // step and those before may have touched ends.
  void begin_step(size_t used);
  void end_step();

 private:
  using Clock = std::chrono::steady_clock;

  bool is_forked() const;
  void work();
  size_t touch(size_t begin, size_t end) const;

  uint8_t* const data_;
  const size_t bytes_;
  const size_t lead_;
  const int process_;  // in which the thread is

  std::atomic<int> steps_{0};  // that run; changed with the mutex, read without
  std::mutex mutex_;           // of all below
  std::condition_variable work_came_;
  bool sleeping_ = false;      // until `work_came_`
  bool stopping_ = false;
  Clock::time_point idle_since_;
  size_t populated_ = 0;       // everything before this, or used before it
  size_t wanted_;              // `populated_` is to reach this
  std::thread thread_;
};

}  // namespace octavo
