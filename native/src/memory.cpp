#include "memory.h"

#include <sys/mman.h>

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

}  // namespace octavo
