#pragma once

#include <cstddef>
#include <string>

namespace syncnorm {

/// A file that appears under its name when it is committed, and never otherwise. Errors are
/// c10::Error that begin with `who`.
class AtomicFile {
 public:
  AtomicFile(std::string path, std::string who);
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  /// Errors wait for commit(): an archive writer's destructor, which writes too, must not meet an
  /// exception.
  void write(const void* data, size_t size) noexcept;

  /// Flushes to the disk and renames.
  void commit();

 private:
  void check(bool good, const char* verb) const;

  std::string path_;
  std::string who_;
  std::string temporary_;
  int descriptor_ = -1;
  int error_ = 0;
  bool committed_ = false;
};

}  // namespace syncnorm
