// Large, aligned, zeroed memory straight from the kernel, with huge pages where it grants them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>

namespace octavo {

class Memory {
 public:
  Memory() = default;
  explicit Memory(size_t bytes);  // throws std::bad_alloc
  ~Memory();
  Memory(Memory&& other) noexcept;
  Memory& operator=(Memory&& other) noexcept;

  uint8_t* data() const { return data_; }
  size_t size() const { return size_; }
  template <typename T>
  T* as() const { return reinterpret_cast<T*>(data_); }

 private:
  uint8_t* data_ = nullptr;
  size_t size_ = 0;
};

// Memory in pieces that lie close together, so that also those smaller than a huge page are in one.
class Arena {
 public:
  struct Piece {
    std::shared_ptr<const Memory> owner;  // keeps it alive
    uint8_t* data = nullptr;
  };

  // Zeroed, at a page's start. Calls from several threads queue; throws std::bad_alloc.
  Piece take(size_t bytes);

 private:
  std::mutex taking_;
  std::shared_ptr<const Memory> current_;
  size_t used_ = 0;
};

}  // namespace octavo
