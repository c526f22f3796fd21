#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <memory>
#include <string>
#include <vector>

#include "kernels/cuda/launch.h"

/// Inputs of the kernels in memory of exactly their size, and what must come out, by plain loops in
/// double.
namespace syncnorm::kernels::cuda::testing {

const char* name_of(Dtype dtype);
/// `value` as the dtype holds it.
double rounded(double value, Dtype dtype);

/// An array at `offset` elements past a boundary of 16 bytes, filled with NaN. AddressSanitizer
/// sees what is read or written behind it; what lies before is NaN too and must stay so.
class Buffer {
 public:
  Buffer(int64_t size, Dtype dtype, int offset = 0);
  Buffer(const std::vector<double>& values, Dtype dtype, int offset = 0);
  Buffer(std::initializer_list<double> values, Dtype dtype)
      : Buffer(std::vector<double>(values), dtype) {}
  ~Buffer();
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  void* data() { return data_; }
  double* doubles() { return static_cast<double*>(data_); }
  Values values() const { return {data_, dtype_}; }
  MutableValues mutable_values() { return {data_, dtype_}; }
  int64_t size() const { return size_; }
  double operator[](int64_t i) const;
  std::vector<double> all() const;

 private:
  void set(int64_t i, double value);

  int64_t size_, before_ = 0;
  Dtype dtype_;
  char* memory_;
  void* data_;
};

/// How an input is laid out; `groups`: slots are unions of cells, groups of channels of each of
/// `samples`, otherwise cells.
struct Shape {
  int64_t outer = 1, cells = 1, inner = 1;
  int64_t affine_rows = 0;  ///< 0: as many as cells
  bool by_column = false;
  int64_t groups = 0, samples = 1;

  int64_t elements() const { return outer * cells * inner; }
};
std::ostream& operator<<(std::ostream& out, const Shape& shape);

/// Shapes of every kind, with sizes that straddle warps, vectors, blocks and splits.
const std::vector<Shape>& all_shapes();

/// What varies from one run of a shape to the next.
struct Variant {
  int number = 0;
  Dtype dtype = Dtype::float32;
  int multiprocessors = 1;
  bool centered = true;
  bool shared_out = false;
  /// One of `count` choices: each `question` is answered independently of the others.
  int pick(int question, int count) const;
  bool one_in(int question, int count) const { return pick(question, count) == 0; }
  /// Of the array `which` from a boundary: none, all alike, or each its own.
  int offset(int which) const {
    if (one_in(-1, 2)) return 0;
    return one_in(-2, 2) ? pick(-3, 4) : pick(-4 - which, 4);
  }
};
/// Calls body for each shape and dtype with a few variants.
void for_all(const std::vector<Shape>& shapes,
             const std::function<void(const Shape&, const Variant&)>& body);

/// A layout with its maps, and the numbers of a norm.
class Problem {
 public:
  Problem(const Shape& shape, const Variant& variant);

  Layout layout() const;
  int64_t cell_of(int64_t element) const { return element / shape.inner % shape.cells; }
  int64_t slot_of(int64_t cell) const { return shape.groups == 0 ? cell : slots_of_cells_[cell]; }
  double share_of(int64_t cell) const { return variant.shared_out ? share_[cell] : 1; }
  /// Where the element's weight is.
  int64_t affine_of(int64_t element) const {
    const int64_t row = cell_of(element) % affine_rows;
    return shape.by_column ? row * shape.inner + element % shape.inner : row;
  }
  /// Random values about `mean`, as the dtype holds them.
  std::vector<double> random(int64_t count, double mean, double deviation, Dtype dtype);
  std::vector<double> random(int64_t count, double mean = 0, double deviation = 1) {
    return random(count, mean, deviation, variant.dtype);
  }

  Shape shape;
  Variant variant;
  int64_t affine_rows, affine_size, slots;
  std::vector<double> x, dy, weight, bias, statistics;

 private:
  uint64_t seed_;
  std::vector<int64_t> slots_of_cells_, cells_by_slot_, slot_begin_;
  std::vector<double> share_;
};

/// What a call needs besides; afterwards all counters must be zero again.
class Device {
 public:
  explicit Device(int multiprocessors, int64_t workspace = 0);
  ~Device();
  const Resources& resources() const { return resources_; }

 private:
  std::unique_ptr<int32_t[]> counters_;
  std::unique_ptr<double[]> workspace_;
  Resources resources_;
};

/// Relative to the size of what is added.
double sum_tolerance(Dtype dtype);
double pass_tolerance(Dtype dtype);

/// |got - want| <= tolerance*scale for each; NaN where NaN is wanted.
void expect_near(const std::vector<double>& got, const std::vector<double>& want,
                 const std::vector<double>& scale, double tolerance, const char* what);

}  // namespace syncnorm::kernels::cuda::testing
