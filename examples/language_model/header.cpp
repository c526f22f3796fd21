#include "header.h"

#include <filesystem>
#include <stdexcept>

#include "syncnorm/checkpoint.h"

namespace language_model {

std::map<std::string, std::string> to_metadata(const Header& header) {
  const auto& [step, loss, since_log] = header.position;
  return {
      {"recipe", header.recipe.dump()},
      {"position", nlohmann::json{{"step", step}, {"loss", loss}, {"since_log", since_log}}.dump()},
      {"checksum", header.checksum},
      {"tokenizer", header.tokenizer.to_json()}};
}

Header read_header(const std::string& folder) {
  if (!std::filesystem::exists(folder))
    throw std::runtime_error("there is no checkpoint " + folder +
                             "; train a model with --out first");
  const auto metadata = syncnorm::read_checkpoint_metadata(folder);
  try {
    Header header;
    header.recipe = nlohmann::json::parse(metadata.at("recipe"));
    const auto position = nlohmann::json::parse(metadata.at("position"));
    position.at("step").get_to(header.position.step);
    position.at("loss").get_to(header.position.loss);
    position.at("since_log").get_to(header.position.since_log);
    header.checksum = metadata.at("checksum");
    header.tokenizer = Tokenizer::from_json(metadata.at("tokenizer"));
    return header;
  } catch (const std::exception& error) {
    throw std::runtime_error(folder + " is no checkpoint of this program");
  }
}

}  // namespace language_model
