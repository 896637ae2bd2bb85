#include "memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>

namespace octavo {

namespace {

constexpr size_t kPage = 4096;

#if defined(__SANITIZE_ADDRESS__)
// From the heap and to the byte: AddressSanitizer guards the ends of what lies there, not those of
// mappings.
constexpr size_t kRounded = 1, kChunk = 0;

uint8_t* take_zeroed(size_t bytes) {
  void* found = nullptr;
  if (posix_memalign(&found, kPage, bytes) != 0) throw std::bad_alloc();
  std::memset(found, 0, bytes);
  return static_cast<uint8_t*>(found);
}

void give_back(uint8_t* data, size_t) { std::free(data); }
#else
constexpr size_t kRounded = kPage;
constexpr size_t kChunk = size_t{64} << 20;  // what is never touched costs addresses alone

uint8_t* take_zeroed(size_t bytes) {
  void* found = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (found == MAP_FAILED) throw std::bad_alloc();
#if defined(MADV_HUGEPAGE)
  madvise(found, bytes, MADV_HUGEPAGE);  // advice only: a refusal costs speed, nothing else
#endif
  return static_cast<uint8_t*>(found);
}

void give_back(uint8_t* data, size_t bytes) { munmap(data, bytes); }
#endif

}  // namespace

Memory::Memory(size_t bytes) : size_(bytes) {
  if (bytes > 0) data_ = take_zeroed(bytes);
}

Memory::~Memory() {
  if (data_) give_back(data_, size_);
}

Memory::Memory(Memory&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

Memory& Memory::operator=(Memory&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

Arena::Piece Arena::take(size_t bytes) {
  std::lock_guard<std::mutex> lock(taking_);
  const size_t rounded = (bytes + kRounded - 1) / kRounded * kRounded;
  if (!current_ || used_ + rounded > current_->size()) {
    current_ = std::make_shared<const Memory>(std::max(rounded, kChunk));
    used_ = 0;
  }
  uint8_t* data = current_->data() + used_;
  used_ += rounded;
  return {current_, data};
}

}  // namespace octavo
