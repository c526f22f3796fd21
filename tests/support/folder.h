#pragma once

#include <stdlib.h>

#include <cstring>
#include <filesystem>
#include <string>

#include "support/world.h"

namespace syncnorm::testing {

/// A folder that lives as long as this object.
class TemporaryFolder {
 public:
  TemporaryFolder() {
    auto pattern = (std::filesystem::temp_directory_path() / "syncnorm-XXXXXX").string();
    path_ = ::mkdtemp(pattern.data());
  }
  ~TemporaryFolder() { std::filesystem::remove_all(path_); }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  std::string file(const std::string& name) const { return (path_ / name).string(); }

 private:
  std::filesystem::path path_;
};

/// The same for all ranks together.
class SharedFolder {
 public:
  explicit SharedFolder(std::shared_ptr<Communicator> comm) : comm_(std::move(comm)) {
    auto name = torch::zeros({1024}, torch::kByte);
    if (comm_->rank() == 0) {
      own_ = std::make_unique<TemporaryFolder>();
      const auto path = own_->file("");
      std::memcpy(name.data_ptr(), path.data(), path.size());
    }
    comm_->broadcast(name, 0);
    path_ = static_cast<const char*>(name.const_data_ptr());
  }
  ~SharedFolder() { comm_->barrier(); }
  std::string file(const std::string& name) const { return path_ + name; }

 private:
  std::shared_ptr<Communicator> comm_;
  std::unique_ptr<TemporaryFolder> own_;
  std::string path_;
};

}  // namespace syncnorm::testing
