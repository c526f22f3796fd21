#pragma once

#include <CLI/CLI.hpp>
#include <functional>
#include <set>
#include <string>
#include <vector>

#include "common/output.h"

namespace job {

/// Limits that are checked but do not clutter --help.
template <typename T>
CLI::Validator between(T low, T high) {
  return CLI::Range(low, high).description("");
}

inline CLI::Validator one_of(std::vector<std::string> names) {
  return CLI::IsMember(std::move(names)).description("");
}

/// Adds options of one group with its default shown.
class Group {
 public:
  Group(CLI::App& app, std::string name) : app_(app), name_(std::move(name)) {}

  template <typename T>
  CLI::Option* option(const std::string& flag, T& value, const std::string& type,
                      const std::string& help) {
    return app_.add_option(flag, value, help)->type_name(type)->capture_default_str()->group(name_);
  }
  CLI::Option* flag(const std::string& flag, bool& value, const std::string& help) {
    return app_.add_flag(flag, value, help)->group(name_);
  }

 private:
  CLI::App& app_;
  std::string name_;
};

/// The options of every job that say where it writes to; `files` is what the folder receives.
void add_output_flags(CLI::App& app, Output& output, const std::string& files);

/// Raises CLI::ValidationError where some of those `given` contradict each other.
void check_output_flags(const Output& output, const std::set<std::string>& given);

/// --device and --precision, as place() and Autocast take them.
void add_compute_flags(CLI::App& app, std::string& device, std::string& precision);

/// Raises CLI::ValidationError, with `why`, where --`flag` is one of those `given`.
void refuse(const std::set<std::string>& given, const std::string& flag, const std::string& why);

/// Names of the options on the command line, without dashes.
std::set<std::string> given_options(const CLI::App& app);

/// Parses the command line and then runs `check`, which raises CLI::ValidationError for what does
/// not go together. False: the program is to end with `status` (help was asked for, or an option is
/// wrong), what there is to say having been printed where `speak` is set.
bool parse(CLI::App& app, int argc, char** argv, bool speak, int& status,
           const std::function<void()>& check);

}  // namespace job
