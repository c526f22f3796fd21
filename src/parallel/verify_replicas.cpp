#include "parallel/verify_replicas.h"

#include <algorithm>
#include <sstream>

#include "comm/fnv1a.h"

namespace syncnorm {
namespace {

using Lines = std::vector<std::string>;

std::string describe(const char* kind, const std::string& name, const torch::Tensor& tensor) {
  std::ostringstream text;
  text << kind << " '" << name << "' " << tensor.scalar_type() << ' ' << tensor.sizes()
       << " strides " << tensor.strides() << (tensor.requires_grad() ? " requires_grad" : "");
  return text.str();
}

Lines describe_replica(const NamedTensors& parameters, const NamedTensors& buffers,
                       const DistributedDataParallelOptions& options) {
  Lines lines;
  for (const auto& [name, tensor] : parameters)
    lines.push_back(describe("parameter", name, tensor));
  for (const auto& [name, tensor] : buffers) lines.push_back(describe("buffer", name, tensor));
  lines.push_back("option bucket_cap_bytes " + std::to_string(options.bucket_cap_bytes()));
  lines.push_back("option find_unused_parameters " +
                  std::to_string(options.find_unused_parameters()));
  lines.push_back("option broadcast_buffers " + std::to_string(options.broadcast_buffers()));
  return lines;
}

std::string joined(const Lines& lines) {
  std::string text;
  for (const auto& line : lines) text += line + '\n';
  return text;
}

Lines split_lines(const std::string& text) {
  Lines lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

/// Every rank's text, in rank order.
Lines gather_texts(Communicator& comm, const std::string& mine, const torch::Tensor& lengths) {
  const std::vector<int64_t> sizes(lengths.data_ptr<int64_t>(),
                                   lengths.data_ptr<int64_t>() + comm.size());
  auto bytes = torch::empty({static_cast<int64_t>(mine.size())}, torch::kUInt8);
  std::copy(mine.begin(), mine.end(), bytes.data_ptr<uint8_t>());
  const auto all = comm.all_gather(bytes, sizes);
  const auto* next = reinterpret_cast<const char*>(all.data_ptr<uint8_t>());
  Lines texts;
  for (const auto size : sizes) {
    texts.emplace_back(next, static_cast<size_t>(size));
    next += size;
  }
  return texts;
}

[[noreturn]] void raise_first_difference(const Lines& texts) {
  const auto reference = split_lines(texts[0]);
  const std::string nothing = "nothing more";
  for (size_t rank = 1; rank < texts.size(); ++rank) {
    const auto lines = split_lines(texts[rank]);
    for (size_t i = 0; i < std::max(lines.size(), reference.size()); ++i) {
      const auto& theirs = i < lines.size() ? lines[i] : nothing;
      const auto& ours = i < reference.size() ? reference[i] : nothing;
      TORCH_CHECK(ours == theirs,
                  "DistributedDataParallel: the ranks hold different modules: rank 0 has ", ours,
                  " where rank ", rank, " has ", theirs,
                  ". Build the same module, with the same options, on every rank.");
    }
  }
  TORCH_CHECK(false, "DistributedDataParallel: the ranks hold different modules.");
}

}  // namespace

void verify_replicas(Communicator& comm, const NamedTensors& parameters,
                     const NamedTensors& buffers, const DistributedDataParallelOptions& options) {
  const auto mine = joined(describe_replica(parameters, buffers, options));
  const auto summary = torch::tensor(
      {static_cast<int64_t>(fnv1a(mine)), static_cast<int64_t>(mine.size())}, torch::kInt64);
  const auto all = comm.all_gather(summary.view({1, 2}), std::vector<int64_t>(comm.size(), 1));
  if (all.eq(summary).all().item<bool>()) return;
  raise_first_difference(gather_texts(comm, mine, all.select(1, 1).contiguous()));
}

}  // namespace syncnorm
