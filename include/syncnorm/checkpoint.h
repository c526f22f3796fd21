#pragma once

#include <torch/torch.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "syncnorm/communicator.h"
#include "syncnorm/sharding.h"

namespace syncnorm {

/// Writes a checkpoint that any number of ranks can load: a folder with a safetensors file for each
/// rank that holds its shards, and in the first the replicated tensors (once), `metadata` (rank
/// 0's; keys of the caller's choice that do not begin with "syncnorm.") and how everything is cut.
///
/// `tensors` are those of sharded_tensors(module) and whatever else belongs to them, an optimizer's
/// moments for instance, under names of their own; the same on all ranks. The folder must be
/// visible to all ranks. It is written beside (`folder`.part) and put in place by rank 0 when all
/// ranks are done: at every moment, also after a crash, an old checkpoint there is whole until the
/// new one is. Collective over `comm` (null: the living Environment's world), over which the shards
/// lie: four all-reduces of three words. Raises c10::Error on every rank, saying on which rank what
/// failed (disk full, other names or shapes, a folder that holds other files), with an old
/// checkpoint unharmed.
void save_checkpoint(const std::string& folder, const std::vector<ShardedTensor>& tensors,
                     const std::shared_ptr<Communicator>& comm,
                     const std::map<std::string, std::string>& metadata = {});

/// Reads a checkpoint of save_checkpoint into `tensors`, in place, at any number of ranks and cut
/// in any way; each rank reads only what it needs. Floating-point dtypes convert. Raises c10::Error
/// on every rank, with nothing changed, where a name is missing or of another shape or kind of
/// dtype, where the checkpoint has a name that is not asked for (unless `ignore_unexpected`), or
/// where a file cannot be read. Collective over `comm`: one all-reduce of three words.
void load_checkpoint(const std::string& folder, const std::vector<ShardedTensor>& tensors,
                     const std::shared_ptr<Communicator>& comm, bool ignore_unexpected = false);

/// The `metadata` of save_checkpoint. No communication.
std::map<std::string, std::string> read_checkpoint_metadata(const std::string& folder);

/// Whole parameters and buffers of a module, by name, on the host: on rank 0, other ranks get an
/// empty dict unless `everywhere`. For save_safetensors or save_state_dict, which Python reads. A
/// tensor at a time is gathered; on ranks that keep none only that one is whole in memory.
/// Collective over `comm` (null: the living Environment's world): one all-gather for each sharded
/// tensor.
torch::OrderedDict<std::string, torch::Tensor> gather_state_dict(
    const torch::nn::Module& module, const std::shared_ptr<Communicator>& comm,
    bool everywhere = false);

/// Copies this rank's parts of whole tensors (of gather_state_dict, load_safetensors or
/// read_state_dict) into the parameters and buffers of `module`. No communication. Raises
/// c10::Error naming the tensors where one is missing, unexpected or of another shape, with nothing
/// changed.
void load_whole_state_dict(torch::nn::Module& module,
                           const torch::OrderedDict<std::string, torch::Tensor>& state);

}  // namespace syncnorm
