#include "checkpoint.h"

#include <filesystem>
#include <stdexcept>

namespace segmentation {
namespace {

/// Opens `path`, all tensors on `device` wherever they were saved from, and hands the archive to
/// `read`; any error becomes one message.
template <typename F>
void with_archive(const std::string& path, torch::Device device, F read) {
  if (!std::filesystem::exists(path)) {
    throw std::runtime_error("there is no checkpoint " + path +
                             " to resume from; leave --resume out to start");
  }
  try {
    torch::serialize::InputArchive archive;
    archive.load_from(path, device);
    read(archive);
  } catch (const std::exception&) {
    throw std::runtime_error(
        path + " is damaged or no checkpoint of this program; remove it and start anew");
  }
}

/// Parameters and buffers in a fixed order.
std::vector<torch::Tensor> state_of(const UNet& net) {
  auto state = net->parameters();
  const auto buffers = net->buffers();
  state.insert(state.end(), buffers.begin(), buffers.end());
  return state;
}

}  // namespace

void save_checkpoint(const std::string& path, const CheckpointHeader& header, const UNet& net,
                     const torch::optim::Optimizer& optimizer) {
  const nlohmann::json about = {{"recipe", header.recipe},
                                {"epoch", header.position.epoch},
                                {"images", header.position.images},
                                {"loss", header.position.loss},
                                {"checksum", header.checksum}};
  torch::serialize::OutputArchive archive, weights, state;
  const auto tensors = state_of(net);
  for (size_t i = 0; i < tensors.size(); ++i) {
    weights.write("tensor" + std::to_string(i), tensors[i].detach(), /*is_buffer=*/true);
  }
  optimizer.save(state);
  archive.write("header", c10::IValue(about.dump()));
  archive.write("net", weights);
  archive.write("optimizer", state);

  const auto beside = path + ".new";
  try {
    archive.save_to(beside);
    std::filesystem::rename(beside, path);
  } catch (const std::exception& error) {
    std::error_code ignored;
    std::filesystem::remove(beside, ignored);
    throw std::runtime_error("cannot write the checkpoint " + path +
                             " (disk full, or no permission?)");
  }
}

CheckpointHeader read_checkpoint_header(const std::string& path) {
  CheckpointHeader header;
  with_archive(path, torch::kCPU, [&](torch::serialize::InputArchive& archive) {
    c10::IValue text;
    archive.read("header", text);
    const auto about = nlohmann::json::parse(text.toStringRef());
    header.recipe = about.at("recipe");
    about.at("epoch").get_to(header.position.epoch);
    about.at("images").get_to(header.position.images);
    about.at("loss").get_to(header.position.loss);
    about.at("checksum").get_to(header.checksum);
  });
  return header;
}

void load_checkpoint(const std::string& path, UNet& net, torch::optim::Optimizer& optimizer) {
  const auto device = net->parameters().front().device();
  with_archive(path, device, [&](torch::serialize::InputArchive& archive) {
    torch::serialize::InputArchive weights, state;
    archive.read("net", weights);
    // In place: Module::load would swap the parameters' storage, and the data-parallel hooks on
    // their gradients get lost.
    torch::NoGradGuard no_grad;
    const auto tensors = state_of(net);
    for (size_t i = 0; i < tensors.size(); ++i) {
      torch::Tensor saved;
      weights.read("tensor" + std::to_string(i), saved, /*is_buffer=*/true);
      tensors[i].copy_(saved);
    }
    archive.read("optimizer", state);
    optimizer.load(state);
  });
}

}  // namespace segmentation
