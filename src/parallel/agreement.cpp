#include "parallel/agreement.h"

#include <torch/torch.h>

#include <algorithm>
#include <cstring>

namespace syncnorm {
namespace {

constexpr int64_t kLongestMessage = 4096;

std::string first_line_of(const std::exception& error) {
  const auto* own = dynamic_cast<const c10::Error*>(&error);
  return own != nullptr ? own->what_without_backtrace() : error.what();
}

/// "what went wrong" where it did on all ranks alike, else "rank 1: ...; rank 3: ...".
std::string tell(Communicator& comm, const std::string& mine, int64_t length) {
  auto bytes = torch::zeros({1, length}, torch::kByte);
  std::memcpy(bytes.data_ptr(), mine.data(), mine.size());
  const auto all = comm.all_gather(bytes, std::vector<int64_t>(comm.size(), 1));
  std::vector<std::string> messages;
  for (int r = 0; r < comm.size(); ++r) {
    const auto* text = static_cast<const char*>(all[r].const_data_ptr());
    messages.emplace_back(text, ::strnlen(text, length));
  }
  if (std::count(messages.begin(), messages.end(), messages.front()) == comm.size())
    return messages.front();
  std::string text;
  for (int r = 0; r < comm.size(); ++r) {
    if (!messages[r].empty())
      text += (text.empty() ? "rank " : "; rank ") + std::to_string(r) + ": " + messages[r];
  }
  return text;
}

}  // namespace

void agree(Communicator& comm, const std::string& who, const std::function<uint64_t()>& body) {
  std::string mine;
  int64_t hash = 0;
  try {
    hash = static_cast<int64_t>(body() >> 1);
  } catch (const std::exception& error) {
    mine = first_line_of(error).substr(0, kLongestMessage);
    if (mine.empty()) mine = "unknown error";
  }
  const ModuleScope scope(who);
  const auto words = torch::tensor({static_cast<int64_t>(mine.size()), hash, -hash}, torch::kLong);
  comm.all_reduce(words, ReduceOp::max);
  const auto* most = words.const_data_ptr<int64_t>();
  TORCH_CHECK(most[0] == 0, tell(comm, mine, most[0]));
  TORCH_CHECK(most[1] == -most[2], who,
              ": the ranks give different names, shapes, dtypes or cuts of tensors");
}

}  // namespace syncnorm
