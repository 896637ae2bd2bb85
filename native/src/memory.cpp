#include "memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <new>
#include <utility>

namespace octavo {

Memory::Memory(size_t bytes) : size_(bytes) {
  if (bytes == 0) return;
  void* found = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (found == MAP_FAILED) throw std::bad_alloc();
  data_ = static_cast<uint8_t*>(found);
#if defined(MADV_HUGEPAGE)
  madvise(found, bytes, MADV_HUGEPAGE);  // advice only: a refusal costs speed, nothing else
#endif
}

Memory::~Memory() {
  if (data_) munmap(data_, size_);
}

Memory::Memory(Memory&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

Memory& Memory::operator=(Memory&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

Arena::Piece Arena::take(size_t bytes) {
  constexpr size_t kPage = 4096;
  constexpr size_t kChunk = size_t{64} << 20;  // what is never touched costs addresses alone
  std::lock_guard<std::mutex> lock(taking_);
  const size_t rounded = (bytes + kPage - 1) / kPage * kPage;
  if (!current_ || used_ + rounded > current_->size()) {
    current_ = std::make_shared<const Memory>(std::max(rounded, kChunk));
    used_ = 0;
  }
  uint8_t* data = current_->data() + used_;
  used_ += rounded;
  return {current_, data};
}

}  // namespace octavo
