// Files that are read as memory, and checksums at the speed of memory.
#pragma once

#include <cstdint>
#include <vector>

#include "pool.h"

namespace octavo {

// The whole of a file, mapped for reading: its pages are the page cache's own, so that processes
// share them. Whoever cuts the file short while it is mapped ends this process.
class MappedFile {
 public:
  explicit MappedFile(int descriptor);  // may be closed afterwards; throws std::system_error
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  const uint8_t* data() const { return data_; }
  int64_t size() const { return size_; }

 private:
  const uint8_t* data_ = nullptr;
  int64_t size_ = 0;
};

// Bytes that one checksum covers; the last piece may be shorter.
constexpr int64_t kPieceBytes = 1 << 20;

// One checksum for each piece of the file's first `bytes` bytes, computed on all threads. Also
// brings the pages in. Against accidents only: any change within one lane of 64 bits is found,
// any other goes unnoticed once in 2^64.
std::vector<uint64_t> piece_checksums(Pool& pool, const MappedFile& file, int64_t bytes);

}  // namespace octavo
