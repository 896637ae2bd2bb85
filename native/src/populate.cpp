#include "populate.h"

#include <unistd.h>

#include <algorithm>
#include <system_error>

namespace octavo {

namespace {

constexpr size_t kPage = 4096;                // the smallest; in a huge one all but the first are quick
constexpr size_t kChunk = size_t{2} << 20;
constexpr auto kGrace = std::chrono::milliseconds(20);  // steps of a busy engine follow sooner
constexpr auto kStart = std::chrono::seconds(1);  // so long a server is busy with starting

// Makes the page writable memory of its own. A zero is replaced by zero, in one operation of the
// CPU: whoever stores there at the same time is neither lost nor torn, though the language has no
// word for an atomic operation beside a plain one, hence no sanitizer. (To add or to or 0 may be
// compiled as a load, which would not do: a page that is only read stays the shared page of zeros.)
__attribute__((no_sanitize("thread"))) void touch_page(uint8_t* page) {
  uint8_t zero = 0;
  __atomic_compare_exchange_n(page, &zero, uint8_t{0}, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
}

}  // namespace

Populator::Populator(uint8_t* data, size_t bytes, size_t lead)
    : data_(data),
      bytes_(bytes),
      lead_(lead),
      process_(getpid()),
      idle_since_(Clock::now() + kStart),
      wanted_(std::min(lead, bytes)) {
  try {
    thread_ = std::thread([this] { work(); });
  } catch (const std::system_error&) {
    // This system gives no more threads.
  }
}

Populator::~Populator() {
  begin_step(0);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  work_came_.notify_one();
  if (thread_.joinable()) thread_.join();
}

bool Populator::is_forked() const { return getpid() != process_; }

void Populator::begin_step(size_t used) {
  if (is_forked()) return;
  std::lock_guard<std::mutex> lock(mutex_);
  steps_.fetch_add(1, std::memory_order_relaxed);
  populated_ = std::max(populated_, used);
  wanted_ = std::max(wanted_, std::min(used + lead_, bytes_));
}

void Populator::end_step() {
  if (is_forked()) return;
  std::lock_guard<std::mutex> lock(mutex_);
  idle_since_ = Clock::now();
  if (steps_.fetch_sub(1, std::memory_order_relaxed) == 1 && sleeping_ && populated_ < wanted_)
    work_came_.notify_one();
}

void Populator::work() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (!stopping_) {
    if (steps_.load(std::memory_order_relaxed) > 0 || populated_ >= wanted_) {
      sleeping_ = true;
      work_came_.wait(lock);
      sleeping_ = false;
    } else if (Clock::now() < idle_since_ + kGrace) {
      work_came_.wait_until(lock, idle_since_ + kGrace);
    } else {
      const size_t begin = populated_, end = std::min(begin + kChunk, wanted_);
      lock.unlock();
      const size_t reached = touch(begin, end);
      lock.lock();
      populated_ = std::max(populated_, reached);
    }
  }
}

// Touches [begin, end) until a step begins; returns how far it came.
size_t Populator::touch(size_t begin, size_t end) const {
  while (begin < end && steps_.load(std::memory_order_relaxed) == 0) {
    touch_page(data_ + begin);
    begin += kPage;
  }
  return std::min(begin, end);
}

}  // namespace octavo
