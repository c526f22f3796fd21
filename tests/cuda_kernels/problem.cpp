#include "cuda_kernels/problem.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cmath>
#include <cstdlib>
#include <ostream>

namespace syncnorm::kernels::cuda::testing {
namespace {

int64_t size_of(Dtype dtype) {
  return dtype == Dtype::float64 ? 8 : dtype == Dtype::float32 ? 4 : 2;
}

/// The same numbers everywhere, which the standard's distributions are not.
uint64_t next(uint64_t& seed) {
  seed = seed * 6364136223846793005u + 1442695040888963407u;
  return seed >> 33;
}

constexpr Dtype kDtypes[] = {Dtype::float32, Dtype::float64, Dtype::float16, Dtype::bfloat16};

}  // namespace

const char* name_of(Dtype dtype) {
  switch (dtype) {
    case Dtype::float64:
      return "double";
    case Dtype::float16:
      return "half";
    case Dtype::bfloat16:
      return "bfloat16";
    default:
      return "float";
  }
}

double rounded(double value, Dtype dtype) {
  const auto single = static_cast<float>(value);
  switch (dtype) {
    case Dtype::float64:
      return value;
    case Dtype::float16:
      return __half2float(__float2half_rn(single));
    case Dtype::bfloat16:
      return __bfloat162float(__float2bfloat16_rn(single));
    default:
      return single;
  }
}

Buffer::Buffer(int64_t size, Dtype dtype, int offset) : size_(size), dtype_(dtype) {
  before_ = offset * size_of(dtype);
  const auto bytes = static_cast<size_t>(before_ + size * size_of(dtype));
  memory_ = static_cast<char*>(std::malloc(bytes));
  std::memset(memory_, 0xff, bytes);
  data_ = memory_ + before_;
}

Buffer::Buffer(const std::vector<double>& values, Dtype dtype, int offset)
    : Buffer(static_cast<int64_t>(values.size()), dtype, offset) {
  for (size_t i = 0; i < values.size(); ++i) set(static_cast<int64_t>(i), values[i]);
}

Buffer::~Buffer() {
  for (int64_t i = 0; i < before_; ++i)
    if (memory_[i] != '\xff') ADD_FAILURE() << "written to, " << before_ - i << " bytes before it";
  std::free(memory_);
}

void Buffer::set(int64_t i, double value) {
  switch (dtype_) {
    case Dtype::float64:
      static_cast<double*>(data_)[i] = value;
      break;
    case Dtype::float16:
      static_cast<__half*>(data_)[i] = __float2half_rn(static_cast<float>(value));
      break;
    case Dtype::bfloat16:
      static_cast<__nv_bfloat16*>(data_)[i] = __float2bfloat16_rn(static_cast<float>(value));
      break;
    default:
      static_cast<float*>(data_)[i] = static_cast<float>(value);
  }
}

double Buffer::operator[](int64_t i) const {
  switch (dtype_) {
    case Dtype::float64:
      return static_cast<double*>(data_)[i];
    case Dtype::float16:
      return __half2float(static_cast<__half*>(data_)[i]);
    case Dtype::bfloat16:
      return __bfloat162float(static_cast<__nv_bfloat16*>(data_)[i]);
    default:
      return static_cast<float*>(data_)[i];
  }
}

std::vector<double> Buffer::all() const {
  std::vector<double> values;
  for (int64_t i = 0; i < size_; ++i) values.push_back((*this)[i]);
  return values;
}

std::ostream& operator<<(std::ostream& out, const Shape& shape) {
  out << shape.outer << " x " << shape.cells << " x " << shape.inner;
  if (shape.by_column) out << " by column";
  if (shape.affine_rows > 0) out << ", " << shape.affine_rows << " affine rows";
  if (shape.groups > 0) out << ", " << shape.groups << " groups";
  return out;
}

const std::vector<Shape>& all_shapes() {
  static const std::vector<Shape> shapes = [] {
    std::vector<Shape> all{
        // Channels of contiguous memory.
        {2, 3, 31},
        {2, 3, 32},
        {3, 2, 33},
        {4, 3, 49},
        {1, 300, 5},
        {3, 5, 2},
        {2, 2, 1023},
        {1, 2, 4099},
        {2, 1, 10007},
        {1, 1, 33000},
        {1, 65, 2051},
        {1, 2100, 33},
        // Channels side by side.
        {1, 5, 1},
        {33, 3, 1},
        {100, 8, 1},
        {70, 33, 1},
        {31, 264, 1},
        {1100, 4, 1},
        {3, 2101, 1},
        {600, 128, 1},
        // Rows.
        {1, 1, 1, 1, true},
        {1, 5, 31, 1, true},
        {1, 33, 64, 1, true},
        {1, 70, 32, 1, true},
        {1, 9, 1001, 1, true},
        {1, 300, 8, 1, true},
        {1, 70, 1032, 1, true},
        {1, 6, 4104, 1, true},
        {1, 12, 64, 3, true},
        {1, 210, 40, 70, true},
        // Groups of channels.
        {1, 12, 7, 6, false, 3, 2},
        {1, 12, 1, 6, false, 3, 2},
        {1, 80, 40, 40, false, 1, 2},
        {1, 4, 10007, 2, false, 1, 2},
        {1, 6, 16, 1, true, 2, 1},
        // Of nothing.
        {0, 3, 5},
        {2, 3, 0},
        {0, 4, 1},
        {1, 0, 7, 1, true},
        {1, 3, 0, 1, true},
        {1, 0, 7, 6, false, 3, 2},
    };
    return all;
  }();
  return shapes;
}

void for_all(const std::vector<Shape>& shapes,
             const std::function<void(const Shape&, const Variant&)>& body) {
  constexpr int multiprocessors[] = {1, 2, 7, 132};
  constexpr cuda_emulation::Order orders[] = {cuda_emulation::Order::forward,
                                              cuda_emulation::Order::backward,
                                              cuda_emulation::Order::shuffled};
  int number = 0;
  for (const auto& shape : shapes)
    for (const auto dtype : kDtypes)
      for (int i = 0; i < (shape.elements() > 50000 ? 1 : 2); ++i, ++number) {
        Variant variant{number, dtype};
        variant.multiprocessors = multiprocessors[variant.pick(-10, 4)];
        variant.centered = !variant.one_in(-11, 4);
        variant.shared_out = variant.one_in(-12, 2);
        cuda_emulation::set_order(orders[variant.pick(-13, 3)]);
        SCOPED_TRACE(::testing::Message()
                     << shape << " " << name_of(dtype) << ", variant " << number);
        body(shape, variant);
        if (::testing::Test::HasFailure()) return;
      }
}

int Variant::pick(int question, int count) const {
  auto bits = static_cast<uint64_t>(number * 64 + question + 32) * 0x9e3779b97f4a7c15u;
  bits = (bits ^ bits >> 30) * 0xbf58476d1ce4e5b9u;
  bits = (bits ^ bits >> 27) * 0x94d049bb133111ebu;
  return static_cast<int>((bits ^ bits >> 31) % static_cast<uint64_t>(count));
}

Problem::Problem(const Shape& shape_, const Variant& variant_)
    : shape(shape_),
      variant(variant_),
      affine_rows(shape.affine_rows == 0 ? shape.cells : shape.affine_rows),
      affine_size(shape.by_column ? affine_rows * shape.inner : affine_rows),
      slots(shape.groups == 0 ? shape.cells : shape.groups * shape.samples),
      seed_(static_cast<uint64_t>(variant.number) + 1) {
  if (shape.groups > 0) {
    // Channels are dealt out, so that a group's cells do not lie side by side.
    const int64_t channels = shape.cells / shape.samples;
    for (int64_t c = 0; c < shape.cells; ++c)
      slots_of_cells_.push_back(c / channels * shape.groups + c % channels % shape.groups);
    for (int64_t s = 0; s < slots; ++s) {
      slot_begin_.push_back(static_cast<int64_t>(cells_by_slot_.size()));
      for (int64_t c = 0; c < shape.cells; ++c)
        if (slots_of_cells_[c] == s) cells_by_slot_.push_back(c);
    }
    slot_begin_.push_back(shape.cells);
  }
  for (int64_t c = 0; c < shape.cells; ++c) share_.push_back(static_cast<double>(next(seed_) % 2));
  x = random(shape.elements(), 3);
  dy = random(shape.elements());
  weight = random(affine_size, 1);
  bias = random(affine_size);
  statistics = random(3 * slots, 3, 0.3, Dtype::float64);
  for (int64_t s = 0; s < slots; ++s)
    statistics[2 * slots + s] = 1 / std::sqrt(std::abs(statistics[slots + s]) + 0.1);
}

Layout Problem::layout() const {
  Layout layout;
  layout.outer = shape.outer;
  layout.cells = shape.cells;
  layout.inner = shape.inner;
  layout.slots = slots;
  if (shape.groups > 0) {
    layout.slot_of_cell = slots_of_cells_.data();
    layout.cells_by_slot = cells_by_slot_.data();
    layout.slot_begin = slot_begin_.data();
    // No cells, but slots all the same.
    static const int64_t none = 0;
    if (shape.cells == 0) layout.slot_of_cell = layout.cells_by_slot = &none;
  }
  if (variant.shared_out) layout.share = share_.data();
  layout.affine_rows = affine_rows;
  layout.by_column = shape.by_column;
  layout.centered = variant.centered;
  return layout;
}

std::vector<double> Problem::random(int64_t count, double mean, double deviation, Dtype dtype) {
  std::vector<double> values;
  for (int64_t i = 0; i < count; ++i) {
    double sum = 0;  // of twelve: nearly normal
    for (int k = 0; k < 12; ++k) sum += static_cast<double>(next(seed_)) * 0x1p-31;
    values.push_back(mean + deviation * (sum - 6));
  }
  return Buffer(values, dtype).all();
}

Device::Device(int multiprocessors, int64_t workspace)
    : counters_(new int32_t[kCounters]()), workspace_(new double[workspace / 8]) {
  EXPECT_EQ(workspace % 8, 0);
  std::fill_n(workspace_.get(), workspace / 8, std::nan(""));
  resources_.multiprocessors = multiprocessors;
  resources_.counters = counters_.get();
  resources_.workspace = workspace_.get();
}

Device::~Device() {
  for (int64_t i = 0; i < kCounters; ++i)
    if (counters_[i] != 0) ADD_FAILURE() << "counter " << i << " is " << counters_[i];
}

double sum_tolerance(Dtype dtype) { return dtype == Dtype::float64 ? 1e-13 : 2e-6; }

double pass_tolerance(Dtype dtype) {
  switch (dtype) {
    case Dtype::float64:
      return 1e-14;
    case Dtype::float16:
      return 1.01 * 0x1p-11;
    case Dtype::bfloat16:
      return 1.01 * 0x1p-8;
    default:
      return 8 * 0x1p-24;
  }
}

void expect_near(const std::vector<double>& got, const std::vector<double>& want,
                 const std::vector<double>& scale, double tolerance, const char* what) {
  ASSERT_EQ(got.size(), want.size()) << what;
  for (size_t i = 0; i < got.size(); ++i) {
    if (std::isnan(want[i]) ? std::isnan(got[i])
                            : std::abs(got[i] - want[i]) <= tolerance * scale[i])
      continue;
    ADD_FAILURE() << what << "[" << i << "] is " << got[i] << ", not " << want[i] << " (scale "
                  << scale[i] << ")";
    return;
  }
}

}  // namespace syncnorm::kernels::cuda::testing
