#include "comm/signature.h"

#include <algorithm>
#include <map>
#include <sstream>

namespace syncnorm {
namespace {

using Fields = std::vector<std::pair<std::string, std::string>>;

Fields parse(const std::string& text) {
  Fields fields;
  std::istringstream stream(text);
  for (std::string item; std::getline(stream, item, ';');) {
    const auto equals = item.find('=');
    if (equals != std::string::npos)
      fields.emplace_back(item.substr(0, equals), item.substr(equals + 1));
  }
  return fields;
}

std::string value_of(const Fields& fields, const std::string& name) {
  const auto found =
      std::find_if(fields.begin(), fields.end(), [&](const auto& f) { return f.first == name; });
  return found == fields.end() ? "(none)" : found->second;
}

}  // namespace

std::string describe_differences(const std::vector<std::string>& signatures) {
  std::vector<Fields> ranks;
  std::vector<std::string> names;
  for (const auto& text : signatures) {
    ranks.push_back(parse(text));
    for (const auto& field : ranks.back())
      if (std::find(names.begin(), names.end(), field.first) == names.end())
        names.push_back(field.first);
  }
  std::ostringstream out;
  for (const auto& name : names) {
    std::map<std::string, std::vector<size_t>> holders;
    for (size_t r = 0; r < ranks.size(); ++r) holders[value_of(ranks[r], name)].push_back(r);
    if (holders.size() < 2) continue;
    out << (out.tellp() > 0 ? "; " : "") << name << " differs:";
    const char* separator = " ";
    for (const auto& [value, who] : holders) {
      out << separator << (who.size() > 1 ? "ranks" : "rank");
      for (const size_t r : who) out << ' ' << r;
      out << (who.size() > 1 ? " have " : " has ") << value;
      separator = ", ";
    }
  }
  return out.str();
}

}  // namespace syncnorm
