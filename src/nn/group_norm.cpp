#include "syncnorm/group_norm.h"

#include "comm/signature.h"
#include "nn/norm_checks.h"
#include "nn/prepared_norm.h"
#include "syncnorm/environment.h"

namespace syncnorm {
namespace {

/// Whether some group has channels on more than one rank.
bool straddles(const Sharding& shard, int64_t channels_a_group) {
  for (const auto& ranges : shard.ranges)
    for (const auto& range : ranges)
      if (range.size > 0 && (range.offset % channels_a_group != 0 ||
                             (range.offset + range.size) % channels_a_group != 0))
        return true;
  return false;
}

std::vector<int64_t> groups_of(const Range& channels, int64_t channels_a_group) {
  std::vector<int64_t> groups(channels.size);
  for (int64_t c = 0; c < channels.size; ++c) groups[c] = (channels.offset + c) / channels_a_group;
  return groups;
}

}  // namespace

ParallelGroupNormImpl::ParallelGroupNormImpl(ParallelGroupNormOptions options_)
    : NamedModule("ParallelGroupNorm", options_.name()), options(std::move(options_)) {
  ParallelGroupNormImpl::reset();
}

void ParallelGroupNormImpl::reset() {
  const int64_t groups = options.num_groups(), channels = options.num_channels();
  TORCH_CHECK_VALUE(groups > 0 && channels > 0 && channels % groups == 0, display_name(),
                    ": num_channels (", channels, ") must be a positive multiple of num_groups (",
                    groups, ")");
  auto comm = communicator_or_world(options.communicator(), display_name());
  statistics_ = comm;
  shard_ = Sharding();
  if (options.split() == Split::channels) {
    const auto sizes = options.shard_sizes().empty() ? balanced_shards(channels, comm->size())
                                                     : options.shard_sizes();
    shard_ = Sharding::consecutive(comm, 0, sizes);
    TORCH_CHECK_VALUE(shard_.extent == channels, display_name(), ": shard_sizes ", sizes,
                      " add up to ", shard_.extent, ", num_channels is ", channels);
    if (!straddles(shard_, channels / groups)) statistics_ = self_communicator();
  } else {
    TORCH_CHECK_VALUE(options.shard_sizes().empty(), display_name(),
                      ": shard_sizes are channels of each rank, but it is space that is split");
  }
  const int64_t local = shard_.replicated() ? channels : shard_.local_size(comm->rank());
  const auto parameter = [&] { return options.affine() ? torch::empty({local}) : torch::Tensor(); };
  weight = register_parameter("weight", parameter(), options.affine());
  bias = register_parameter("bias", parameter(), options.affine());
  reset_parameters();
}

void ParallelGroupNormImpl::reset_parameters() {
  if (!weight.defined()) return;
  torch::nn::init::ones_(weight);
  torch::nn::init::zeros_(bias);
}

Sharding ParallelGroupNormImpl::sharding_of(const std::string& /*name*/) const { return shard_; }

torch::Tensor ParallelGroupNormImpl::forward(const torch::Tensor& input) {
  const auto& name = display_name();
  check_norm_input(input, name);
  const int64_t channels = options.num_channels(), groups = options.num_groups();
  const auto mine =
      shard_.replicated() ? Range{0, channels} : shard_.ranges[shard_.comm->rank()].front();
  TORCH_CHECK_VALUE(input.dim() >= 2 && input.size(1) == mine.size, name,
                    ": expected an input [N, ", mine.size, ", ...], this rank's of ", channels,
                    " channels, got ", input.sizes());
  check_norm_parameter(weight, "weight", {mine.size}, input, name);
  check_norm_parameter(bias, "bias", {mine.size}, input, name);
  check_eps(options.eps(), name);

  PreparedNorm norm;
  norm.comm = statistics_;
  norm.name = name;
  norm.part.eps = options.eps();
  auto& layout = norm.part.layout;
  layout = group_layout(input, groups_of(mine, channels / groups), groups);
  Signature details;
  details.add("norm", "group").add("channels", channels);
  if (options.split() == Split::channels) {
    details.add("space", layout.cells.inner);
    layout.count.all = static_cast<double>(channels / groups * layout.cells.inner);
  } else {
    layout.sum_affine_gradients = weight.defined();
  }
  norm.tensors.x = input;
  norm.tensors.weight = weight;
  norm.tensors.bias = bias;
  norm.tensors.details = details.text();
  return run_norm(std::move(norm)).front();
}

void ParallelGroupNormImpl::pretty_print(std::ostream& stream) const {
  stream << std::boolalpha << "ParallelGroupNorm(" << options.num_groups() << ", "
         << options.num_channels() << ", eps=" << options.eps() << ", affine=" << weight.defined()
         << ", split=" << (options.split() == Split::channels ? "channels" : "space") << ")";
}

}  // namespace syncnorm
