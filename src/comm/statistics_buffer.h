#pragma once

#include <ATen/ATen.h>

#include <string>

#include "syncnorm/communicator.h"

namespace syncnorm {

/// A buffer of statistics on its way through one all-reduce, with the two words in front by which
/// every rank sees whether all ranks mean the same thing.
///
/// The words are tag and tag^2. Summed over P ranks they equal P*tag and P*tag^2 on a rank exactly
/// if every rank's tag is that rank's own: the tags' mean and variance are then pinned. They stand
/// in front so that they line up even where the ranks' buffers differ in length.
class StatisticsBuffer {
 public:
  /// Room for `words` doubles on `device`.
  StatisticsBuffer(std::shared_ptr<Communicator> comm, int64_t words, c10::Device device);

  /// Words of the payload from `start`, double of this shape: fill before, read after exchange().
  at::Tensor words(int64_t start, at::IntArrayRef shape) const;

  /// Sums the payload over all ranks. `details` are "field=value;" of everything that must agree
  /// beyond operation, module and sequence number. Raises CommunicationError on every rank where
  /// anything differs.
  void exchange(std::string details);

  static constexpr int64_t kTagWords = 2;

  /// exchange() in parts, for tags that the device writes and compares: begin() gives this rank's
  /// tag, front() the buffer's first words, of which the tags are to hold tag and tag^2, and
  /// travel(), once, sums everything. describe() names the exchange in messages.
  double begin(std::string details);
  at::Tensor front(int64_t words) const;
  void travel();
  std::string describe() const { return comm_->describe_operation(); }

  /// Gives `comm` up, here and for ranks that wait in its last operation, and raises.
  [[noreturn]] static void fail(Communicator& comm, const std::string& message);

  /// Joins the ranks' flat shards like Communicator::all_gather, where the first kGatherTag doubles
  /// of each are room for a tag that is compared on arrival. Raises CommunicationError on every
  /// rank where anything differs.
  static at::Tensor gather(const std::shared_ptr<Communicator>& comm, const at::Tensor& shard,
                           at::IntArrayRef sizes, const std::string& details);

  static constexpr int64_t kGatherTag = 1;

 private:
  std::shared_ptr<Communicator> comm_;
  at::Tensor buffer_;
  std::string details_, signature_;
};

}  // namespace syncnorm
