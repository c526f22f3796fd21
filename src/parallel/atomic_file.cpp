#include "parallel/atomic_file.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <utility>

namespace syncnorm {

AtomicFile::AtomicFile(std::string path, std::string who)
    : path_(std::move(path)),
      who_(std::move(who)),
      temporary_(path_ + ".part" + std::to_string(::getpid())) {
  descriptor_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  check(descriptor_ >= 0, "create");
}

AtomicFile::~AtomicFile() {
  if (descriptor_ >= 0) ::close(descriptor_);
  if (!committed_) ::unlink(temporary_.c_str());
}

void AtomicFile::write(const void* data, size_t size) noexcept {
  const auto* bytes = static_cast<const char*>(data);
  while (size > 0 && error_ == 0) {
    const auto written = ::write(descriptor_, bytes, size);
    if (written < 0) {
      if (errno != EINTR) error_ = errno;
      continue;
    }
    bytes += written;
    size -= static_cast<size_t>(written);
  }
}

void AtomicFile::commit() {
  errno = error_;
  check(error_ == 0, "write");
  check(::fsync(descriptor_) == 0, "write");
  check(::close(std::exchange(descriptor_, -1)) == 0, "write");
  check(std::rename(temporary_.c_str(), path_.c_str()) == 0, "rename to its name");
  committed_ = true;
}

void AtomicFile::check(bool good, const char* verb) const {
  TORCH_CHECK(good, who_, ": cannot ", verb, " '", path_, "': ", std::strerror(errno), ".");
}

}  // namespace syncnorm
