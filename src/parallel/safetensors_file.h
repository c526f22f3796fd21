#pragma once

#include <torch/types.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace syncnorm {

/// A safetensors file open for reading: the header, checked, and any part of a tensor.
class SafetensorsFile {
 public:
  struct Entry {
    std::string name;
    torch::ScalarType dtype = torch::kFloat;
    std::vector<int64_t> shape;
    int64_t begin = 0;  ///< of its bytes, after the header
    int64_t end = 0;
  };

  /// Raises c10::Error, beginning with `who` and naming the file, where it is not a good one.
  SafetensorsFile(std::string path, const std::string& who);
  ~SafetensorsFile();
  SafetensorsFile(const SafetensorsFile&) = delete;
  SafetensorsFile& operator=(const SafetensorsFile&) = delete;

  /// In the header's order.
  const std::vector<Entry>& entries() const { return entries_; }
  /// Null where there is none.
  const Entry* find(const std::string& name) const;
  const std::map<std::string, std::string>& metadata() const { return metadata_; }

  torch::Tensor read(const Entry& entry) const;
  /// Positions [offset, offset + size) along `dim`, reading only those.
  torch::Tensor read(const Entry& entry, int64_t dim, int64_t offset, int64_t size) const;

 private:
  void parse(const std::string& header, int64_t data_size);
  void read_bytes(void* into, int64_t size, int64_t position) const;

  std::string what_;  // who and which file, for messages
  int descriptor_ = -1;
  int64_t data_ = 0;  // where the tensors' bytes start
  std::vector<Entry> entries_;
  std::map<std::string, size_t> index_;
  std::map<std::string, std::string> metadata_;
};

}  // namespace syncnorm
