#include "nn/shards.h"

#include "syncnorm/sharding.h"

namespace syncnorm {

std::vector<int64_t> sizes_or_balanced(std::vector<int64_t> sizes, int64_t total, int ranks,
                                       const std::string& who, const char* what) {
  if (sizes.empty()) return balanced_shards(total, ranks);
  int64_t sum = 0;
  for (const int64_t size : sizes) {
    TORCH_CHECK_VALUE(size >= 0, who, ": ", what, " cannot be negative: ", at::IntArrayRef(sizes));
    sum += size;
  }
  TORCH_CHECK_VALUE(static_cast<int>(sizes.size()) == ranks && sum == total, who, ": ", what, " ",
                    at::IntArrayRef(sizes), " must be ", ranks,
                    " numbers, one for each rank, that add up to ", total);
  return sizes;
}

}  // namespace syncnorm
