#include "mapped_file.h"

#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <system_error>

namespace octavo {

namespace {

constexpr int kLanes = 8;  // enough of them to hide the latency of a multiplication
constexpr uint64_t kFactor = 0x9e3779b97f4a7c15;

// For a given word a bijection of the state, and for a given state one of the word: a difference
// in one word of a lane survives to the end.
inline uint64_t mixed(uint64_t state, uint64_t word) {
  state ^= word;
  return (state << 29 | state >> 35) * kFactor;
}

uint64_t checksum(const uint8_t* data, int64_t bytes) {
  uint64_t lanes[kLanes];
  for (int i = 0; i < kLanes; ++i) lanes[i] = kFactor * (i + 1);
  constexpr int64_t kBlock = kLanes * 8;
  int64_t at = 0;
  for (; at + kBlock <= bytes; at += kBlock) {
    uint64_t words[kLanes];
    std::memcpy(words, data + at, kBlock);
    for (int i = 0; i < kLanes; ++i) lanes[i] = mixed(lanes[i], words[i]);
  }
  uint64_t sum = mixed(kFactor, static_cast<uint64_t>(bytes));
  for (; at < bytes; at += 8) {
    uint64_t word = 0;
    std::memcpy(&word, data + at, static_cast<size_t>(std::min<int64_t>(8, bytes - at)));
    sum = mixed(sum, word);
  }
  for (const uint64_t lane : lanes) sum = mixed(sum, lane);
  return sum ^ sum >> 32;
}

}  // namespace

MappedFile::MappedFile(int descriptor) {
  struct stat status {};
  if (fstat(descriptor, &status) != 0) throw std::system_error(errno, std::generic_category());
  size_ = static_cast<int64_t>(status.st_size);
  if (size_ == 0) return;
  void* found = mmap(nullptr, static_cast<size_t>(size_), PROT_READ, MAP_SHARED, descriptor, 0);
  if (found == MAP_FAILED) throw std::system_error(errno, std::generic_category());
  data_ = static_cast<const uint8_t*>(found);
}

MappedFile::~MappedFile() {
  if (data_) munmap(const_cast<uint8_t*>(data_), static_cast<size_t>(size_));
}

std::vector<uint64_t> piece_checksums(Pool& pool, const MappedFile& file, int64_t bytes) {
  if (bytes < 0 || bytes > file.size())
    throw std::invalid_argument("Checksums were asked of more bytes than the file has.");
  std::vector<uint64_t> sums(static_cast<size_t>((bytes + kPieceBytes - 1) / kPieceBytes));
  pool.for_each(static_cast<int64_t>(sums.size()), 1, [&](int64_t first, int64_t last) {
    for (int64_t piece = first; piece < last; ++piece) {
      const int64_t begin = piece * kPieceBytes;
      const int64_t count = std::min(kPieceBytes, bytes - begin);
      const uint8_t* data = file.data() + begin;
#if defined(MADV_POPULATE_READ)
      // One call instead of a fault every few pages; where it is refused, the faults come.
      madvise(const_cast<uint8_t*>(data), static_cast<size_t>(count), MADV_POPULATE_READ);
#endif
      sums[static_cast<size_t>(piece)] = checksum(data, count);
    }
  });
  return sums;
}

}  // namespace octavo
