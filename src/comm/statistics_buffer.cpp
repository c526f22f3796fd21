#include "comm/statistics_buffer.h"

#include "comm/signature.h"
#include "comm/transport_error.h"

namespace syncnorm {

StatisticsBuffer::StatisticsBuffer(std::shared_ptr<Communicator> comm, int64_t words,
                                   c10::Device device)
    : comm_(std::move(comm)),
      buffer_(
          at::empty({words + kTagWords}, at::TensorOptions().dtype(at::kDouble).device(device))) {}

void StatisticsBuffer::exchange(const std::string& details) {
  Signature signature;
  signature.add("operation", "all_reduce")
      .add("module", ModuleScope::current())
      .add("sequence", comm_->sequence())
      .append(details);
  const double tag = signature.tag();
  const double ranks = comm_->size();
  if (buffer_.is_cpu()) {
    auto* words = buffer_.data_ptr<double>();
    words[0] = tag;
    words[1] = tag * tag;
  } else {
    buffer_.narrow(0, 0, kTagWords).copy_(at::tensor({tag, tag * tag}, at::kDouble));
  }
  comm_->details_ = details;
  try {
    comm_->all_reduce(buffer_);
  } catch (const TransportError&) {
    comm_->raise_disagreement(signature.text());
  }
  const auto sums = buffer_.narrow(0, 0, kTagWords).cpu();
  const auto* sum = sums.const_data_ptr<double>();
  if (sum[0] != ranks * tag || sum[1] != ranks * tag * tag)
    comm_->raise_disagreement(signature.text());
}

}  // namespace syncnorm
