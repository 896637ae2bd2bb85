// A range of work that its owner takes part by part, from whom others take parts when they have nothing
// left to do: so all end together however fast the core of each one is. What else runs on it, or beside it
// where a core has two threads, nobody knows beforehand.
#pragma once

#include <atomic>
#include <cstdint>

namespace octavo {

// Each part is half of what is left (guided self-scheduling, Polychronopoulos and Kuck 1987).
class alignas(64) Claims {
 public:
  struct Part {
    int64_t begin, end;
    explicit operator bool() const { return begin < end; }
  };

  // Offers [begin, end), when nobody is at an earlier offer any more: all its parts are finished, or a
  // barrier was passed since. Whoever takes a part sees what was written before.
  void offer(int64_t begin, int64_t end) {
    const int64_t count = end - begin;
    end_.store(end, std::memory_order_relaxed);
    unfinished_.store(count, std::memory_order_relaxed);
    const uint64_t number = (state_.load(std::memory_order_relaxed) >> 32) + 1;
    state_.store(number << 32 | static_cast<uint64_t>(count), std::memory_order_release);
  }

  // Takes the next part, or none. What belongs to the offer, and may change with the next one, is for
  // `read` to read, from atomics: it counts only if a part is taken.
  template <typename Read>
  Part take(Read read) {
    uint64_t state = state_.load(std::memory_order_acquire);
    for (;;) {
      const auto left = static_cast<int64_t>(state & 0xffffffffu);
      if (left == 0) return {0, 0};
      const int64_t begin = end_.load(std::memory_order_relaxed) - left;
      read();
      const int64_t size = (left + 1) / 2;
      if (state_.compare_exchange_weak(state, state - size, std::memory_order_acq_rel,
                                       std::memory_order_acquire))
        return {begin, begin + size};
    }
  }
  Part take() {
    return take([] {});
  }

  // What a part's taker wrote before is seen by whoever sees that all are finished.
  void finish(const Part& part) { unfinished_.fetch_sub(part.end - part.begin, std::memory_order_release); }
  bool are_finished() const { return unfinished_.load(std::memory_order_acquire) == 0; }

 private:
  std::atomic<uint64_t> state_{0};  // the offer's number, and how much of it is left
  std::atomic<int64_t> end_{0}, unfinished_{0};
};

}  // namespace octavo
