#include "common/failure.h"

#include <torch/torch.h>

#include <cstring>

namespace job {

void agree(syncnorm::Communicator& comm, const std::function<void()>& action) {
  std::string message;
  bool failed = false;
  try {
    action();
  } catch (const c10::Error& error) {
    failed = true;
    message = error.what_without_backtrace();
  } catch (const std::exception& error) {
    failed = true;
    message = error.what();
  }

  const int64_t none = comm.size();
  auto first = torch::tensor({failed ? static_cast<int64_t>(comm.rank()) : none});
  comm.all_reduce(first, syncnorm::ReduceOp::min);
  const auto teller = first.item<int64_t>();
  if (teller < none) throw Failure(broadcast_text(comm, message, static_cast<int>(teller)));
}

std::string broadcast_text(syncnorm::Communicator& comm, const std::string& text, int root) {
  auto length = torch::tensor({static_cast<int64_t>(text.size())});
  comm.broadcast(length, root);
  auto bytes = torch::zeros({length.item<int64_t>()}, torch::kUInt8);
  if (comm.rank() == root) std::memcpy(bytes.data_ptr(), text.data(), text.size());
  if (bytes.numel() > 0) comm.broadcast(bytes, root);
  return {static_cast<const char*>(bytes.data_ptr()), static_cast<size_t>(bytes.numel())};
}

}  // namespace job
