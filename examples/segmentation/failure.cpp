#include "failure.h"

#include <torch/torch.h>

#include <cstring>
#include <string>

namespace segmentation {

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
  if (teller == none) return;

  auto length = torch::tensor({static_cast<int64_t>(message.size())});
  comm.broadcast(length, static_cast<int>(teller));
  auto text = torch::zeros({length.item<int64_t>()}, torch::kUInt8);
  if (comm.rank() == teller) std::memcpy(text.data_ptr(), message.data(), message.size());
  if (text.numel() > 0) comm.broadcast(text, static_cast<int>(teller));
  throw Failure(std::string(static_cast<const char*>(text.data_ptr()), text.numel()));
}

}  // namespace segmentation
