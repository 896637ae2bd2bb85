#include "shared_prefix.h"

#include <algorithm>

namespace octavo {

namespace {

class Finder {
 public:
  Finder(const Batch& batch, int64_t block_size, SharedPrefixes& found,
         const std::function<int64_t(int64_t)>& cut,
         const std::function<bool(int64_t, int64_t, int64_t, int64_t)>& pays)
      : batch_(batch), block_size_(block_size), found_(found), cut_(cut), pays_(pays) {}

  void run() {
    auto& order = found_.order;
    std::sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
      return std::lexicographical_compare(table(a), table(a) + length(a), table(b),
                                          table(b) + length(b));
    });
    found_.own_from.assign(order.size(), 0);
    share(0, static_cast<int64_t>(order.size()), 0, 0);
  }

 private:
  const int32_t* table(int32_t sequence) const {
    return batch_.block_tables + sequence * batch_.table_width;
  }
  // Blocks before the one that the query's own token is in, which nobody else reads.
  int64_t length(int32_t sequence) const { return (batch_.kv_lens[sequence] - 1) / block_size_; }

  // Decodes [first, first + count) agree in `blocks` blocks, of which `tokens` tokens are settled.
  // They are sorted, so what the first and the last agree in, all agree in.
  void share(int64_t first, int64_t count, int64_t blocks, int64_t tokens) {
    if (count < 2) return;
    const int32_t low = found_.order[first], high = found_.order[first + count - 1];
    const int64_t most = std::min(length(low), length(high));
    while (blocks < most && table(low)[blocks] == table(high)[blocks]) ++blocks;
    const int64_t end = cut_(blocks * block_size_);
    if (end > tokens && pays_(first, count, tokens, end)) {
      found_.ranges.push_back({first, count, tokens, end});
      for (int64_t i = first; i < first + count; ++i) found_.own_from[i] = end;
      tokens = end;
    }
    for (int64_t begin = first; begin < first + count;) {
      int64_t stop = begin + 1;
      if (length(found_.order[begin]) > blocks) {
        const int32_t block = table(found_.order[begin])[blocks];
        while (stop < first + count && table(found_.order[stop])[blocks] == block) ++stop;
        share(begin, stop - begin, blocks, tokens);
      }
      begin = stop;
    }
  }

  const Batch& batch_;
  const int64_t block_size_;
  SharedPrefixes& found_;
  const std::function<int64_t(int64_t)>& cut_;
  const std::function<bool(int64_t, int64_t, int64_t, int64_t)>& pays_;
};

}  // namespace

SharedPrefixes find_shared_prefixes(
    const Batch& batch, std::vector<int32_t> decodes, int64_t block_size,
    const std::function<int64_t(int64_t)>& cut,
    const std::function<bool(int64_t, int64_t, int64_t, int64_t)>& pays) {
  SharedPrefixes found;
  found.order = std::move(decodes);
  Finder(batch, block_size, found, cut, pays).run();
  return found;
}

}  // namespace octavo
