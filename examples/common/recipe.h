#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>

namespace job {

namespace detail {
template <typename T>
void put(nlohmann::json& json, const T& value) {
  json = value;
}
template <typename T>
void put(nlohmann::json& json, const std::optional<T>& value) {
  json = value ? nlohmann::json(*value) : nlohmann::json();
}
template <typename T>
void get(const nlohmann::json& json, T& value) {
  json.get_to(value);
}
template <typename T>
void get(const nlohmann::json& json, std::optional<T>& value) {
  value = json.is_null() ? std::nullopt : std::optional<T>(json.get<T>());
}
}  // namespace detail

/// `saved` with the flags that are in `given` at their values in `current`. Raises
/// std::runtime_error naming every such flag that differs and is not one of `free`, those that may
/// change on the way without making it another run.
nlohmann::json merge_recipes(const nlohmann::json& current, const nlohmann::json& saved,
                             const std::set<std::string>& given, const std::set<std::string>& free);

/// A recipe, everything that shapes the result of a run, as an object with a key for each flag. `R`
/// has a function visit(recipe, each) beside it, which calls each(flag, field) for every field of a
/// recipe, const or not.
template <typename R>
nlohmann::json recipe_to_json(const R& recipe) {
  nlohmann::json json;
  visit(recipe, [&](const char* flag, const auto& value) { detail::put(json[flag], value); });
  return json;
}

/// Takes over a checkpoint's recipe, as merge_recipes says. Fields that are newer than the
/// checkpoint are the defaults, which it was trained with.
template <typename R>
void adopt_recipe(R& recipe, const nlohmann::json& saved, const std::set<std::string>& given,
                  const std::set<std::string>& free) {
  auto complete = recipe_to_json(R());
  complete.update(saved);
  const auto merged = merge_recipes(recipe_to_json(recipe), complete, given, free);
  visit(recipe, [&](const char* flag, auto& value) { detail::get(merged.at(flag), value); });
}

}  // namespace job
