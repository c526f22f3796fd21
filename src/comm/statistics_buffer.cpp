#include "comm/statistics_buffer.h"

#include "comm/doubles.h"
#include "comm/signature.h"
#include "comm/tagged_payload.h"
#include "comm/transport_error.h"

namespace syncnorm {

StatisticsBuffer::StatisticsBuffer(std::shared_ptr<Communicator> comm, int64_t words,
                                   c10::Device device)
    : comm_(std::move(comm)), buffer_(empty_doubles({words + kTagWords}, device)) {}

at::Tensor StatisticsBuffer::words(int64_t start, at::IntArrayRef shape) const {
  // What narrow and view come to, without a microsecond each of dispatch.
  auto view = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(buffer_.storage()), buffer_.key_set(), buffer_.dtype());
  view.unsafeGetTensorImpl()->set_storage_offset(kTagWords + start);
  view.unsafeGetTensorImpl()->set_sizes_contiguous(shape);
  return view;
}

namespace {

/// The first `count` words on the host.
at::Tensor on_host(const at::Tensor& buffer, int64_t count) {
  return buffer.is_cpu() ? buffer : buffer.narrow(0, 0, count).cpu();
}

Signature signature_of(const char* operation, const Communicator& comm,
                       const std::string& details) {
  Signature signature;
  signature.add("operation", operation)
      .add("module", ModuleScope::current())
      .add("sequence", comm.sequence())
      .append(details);
  return signature;
}

}  // namespace

double StatisticsBuffer::begin(std::string details) {
  auto signature = signature_of("all_reduce", *comm_, details);
  const double tag = signature.tag();
  details_ = std::move(details);
  signature_ = std::move(signature).text();
  return tag;
}

at::Tensor StatisticsBuffer::front(int64_t words) const { return buffer_.narrow(0, 0, words); }

void StatisticsBuffer::travel() {
  comm_->details_ = std::move(details_);
  try {
    const TaggedPayload tagged;
    comm_->all_reduce(buffer_);
  } catch (const TransportError&) {
    comm_->raise_disagreement(signature_);
  }
}

void StatisticsBuffer::exchange(std::string details) {
  const double tag = begin(std::move(details));
  const double ranks = comm_->size();
  if (buffer_.is_cpu()) {
    auto* words = buffer_.data_ptr<double>();
    words[0] = tag;
    words[1] = tag * tag;
  } else {
    front(kTagWords).copy_(at::tensor({tag, tag * tag}, at::kDouble));
  }
  travel();
  const auto sums = on_host(buffer_, kTagWords);
  const auto* sum = sums.const_data_ptr<double>();
  if (sum[0] != ranks * tag || sum[1] != ranks * tag * tag) comm_->raise_disagreement(signature_);
}

void StatisticsBuffer::fail(Communicator& comm, const std::string& message) {
  comm.announce_failure();
  comm.failure_ = message;
  throw CommunicationError(message);
}

at::Tensor StatisticsBuffer::gather(const std::shared_ptr<Communicator>& comm,
                                    const at::Tensor& shard, at::IntArrayRef sizes,
                                    const std::string& details) {
  const auto signature = signature_of("all_gather", *comm, details);
  const int64_t elements = kGatherTag * 8 / shard.element_size();
  const auto tag = at::full({kGatherTag}, static_cast<double>(signature.tag()), at::kDouble);
  const auto mine = tag.view(shard.scalar_type()).to(shard.device());
  shard.narrow(0, 0, elements).copy_(mine);
  comm->details_ = details;
  at::Tensor all;
  try {
    const TaggedPayload tagged;
    all = comm->all_gather(shard, sizes);
  } catch (const TransportError&) {
    comm->raise_disagreement(signature.text());
  }
  int64_t at = 0;
  for (const int64_t size : sizes) {
    const auto theirs = all.narrow(0, at, elements).cpu().clone().view(at::kDouble);
    if (!at::equal(theirs, tag)) comm->raise_disagreement(signature.text());
    at += size;
  }
  return all;
}

}  // namespace syncnorm
