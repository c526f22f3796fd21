// Compiled for this very processor, with -O3 -ffast-math, and without torch's headers.
#include "streaming.h"

#include <mpi.h>

#include <algorithm>
#include <cmath>
#include <cstring>

namespace syncnorm::bench {
namespace {

// Pages are touched here, so that no timed loop meets a fresh one.
Floats zeros(size_t length) {
  Floats values(new float[length]);
  std::memset(values.get(), 0, length * sizeof(float));
  return values;
}

Floats copy(const float* from, size_t length) {
  Floats values(new float[length]);
  std::memcpy(values.get(), from, length * sizeof(float));
  return values;
}

// Results that nothing reads would be optimised away.
void keep(const void* values) { asm volatile("" ::"r"(values) : "memory"); }

void sum_over_ranks(double* sums, int count) {
  MPI_Allreduce(MPI_IN_PLACE, sums, count, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
}

}  // namespace

StreamingBatchNorm::StreamingBatchNorm(int n, int c, int plane, const float* x, const float* dy,
                                       const float* weight, const float* bias, double eps)
    : n_(n), c_(c), plane_(plane), eps_(eps) {
  const size_t length = size_t(n) * c * plane;
  x_ = copy(x, length);
  dy_ = copy(dy, length);
  weight_ = copy(weight, c);
  bias_ = copy(bias, c);
  y_ = zeros(length);
  dx_ = zeros(length);
  dweight_ = zeros(c);
  dbias_ = zeros(c);
  inverse_ = zeros(c);
  center_ = zeros(c);
  sums_.reset(new double[2 * size_t(c) + 1]);
}

StreamingBatchNorm::~StreamingBatchNorm() = default;

void StreamingBatchNorm::run() {
  forward(x_.get(), y_.get());
  backward(x_.get(), dy_.get(), dx_.get());
  keep(y_.get());
  keep(dx_.get());
}

void StreamingBatchNorm::forward(const float* from, float* to) {
  double* const sum = sums_.get();
  double* const square = sum + c_;
  for (int c = 0; c < c_; ++c) {
    sum[c] = square[c] = 0;
    for (int n = 0; n < n_; ++n) {
      const float* __restrict const x = from + (size_t(n) * c_ + c) * plane_;
      float s = 0, q = 0;
      for (int i = 0; i < plane_; ++i) {
        s += x[i];
        q += x[i] * x[i];
      }
      sum[c] += s;
      square[c] += q;
    }
  }
  square[c_] = double(n_) * plane_;
  sum_over_ranks(sum, 2 * c_ + 1);
  count_ = square[c_];
  for (int c = 0; c < c_; ++c) {
    const double mean = sum[c] / count_;
    center_[c] = float(mean);
    inverse_[c] = float(1 / std::sqrt(square[c] / count_ - mean * mean + eps_));
  }
  for (int n = 0; n < n_; ++n) {
    for (int c = 0; c < c_; ++c) {
      const size_t start = (size_t(n) * c_ + c) * plane_;
      const float* __restrict const x = from + start;
      float* __restrict const y = to + start;
      const float scale = inverse_[c] * weight_[c], shift = bias_[c] - center_[c] * scale;
      for (int i = 0; i < plane_; ++i) y[i] = x[i] * scale + shift;
    }
  }
}

void StreamingBatchNorm::backward(const float* from, const float* gradient, float* to) {
  double* const sum = sums_.get();   // of dy
  double* const product = sum + c_;  // of dy and the normalised x
  for (int c = 0; c < c_; ++c) {
    double s = 0, p = 0;
    for (int n = 0; n < n_; ++n) {
      const size_t start = (size_t(n) * c_ + c) * plane_;
      const float* __restrict const x = from + start;
      const float* __restrict const dy = gradient + start;
      float part_s = 0, part_p = 0;
      for (int i = 0; i < plane_; ++i) {
        part_s += dy[i];
        part_p += dy[i] * x[i];
      }
      s += part_s;
      p += part_p;
    }
    sum[c] = s;
    product[c] = (p - s * center_[c]) * inverse_[c];
    dbias_[c] = float(sum[c]);
    dweight_[c] = float(product[c]);
  }
  sum_over_ranks(sum, 2 * c_);
  for (int n = 0; n < n_; ++n) {
    for (int c = 0; c < c_; ++c) {
      const size_t start = (size_t(n) * c_ + c) * plane_;
      const float* __restrict const x = from + start;
      const float* __restrict const dy = gradient + start;
      float* __restrict const dx = to + start;
      const float a = weight_[c] * inverse_[c];
      const float b = -a * inverse_[c] * float(product[c] / count_);
      const float d = -a * float(sum[c] / count_) - b * center_[c];
      for (int i = 0; i < plane_; ++i) dx[i] = a * dy[i] + b * x[i] + d;
    }
  }
}

StreamingRowNorm::StreamingRowNorm(bool centered, int rows, int own, int hidden, const float* x,
                                   const float* dy, const float* weight, const float* bias,
                                   double eps)
    : centered_(centered), rows_(rows), own_(own), hidden_(hidden), eps_(eps) {
  const size_t length = size_t(rows) * own;
  x_ = copy(x, length);
  dy_ = copy(dy, length);
  weight_ = copy(weight, own);
  bias_ = centered ? copy(bias, own) : zeros(own);
  y_ = zeros(length);
  dx_ = zeros(length);
  dweight_ = zeros(own);
  dbias_ = zeros(own);
  inverse_ = zeros(rows);
  center_ = zeros(rows);
  sums_.reset(new double[2 * size_t(rows)]);
}

StreamingRowNorm::~StreamingRowNorm() = default;

void StreamingRowNorm::run() {
  forward(x_.get(), y_.get());
  backward(x_.get(), dy_.get(), dx_.get());
  keep(y_.get());
  keep(dx_.get());
  keep(dweight_.get());
  keep(dbias_.get());
}

void StreamingRowNorm::forward(const float* x, float* y) {
  centered_ ? forward_as<true>(x, y) : forward_as<false>(x, y);
}

void StreamingRowNorm::backward(const float* x, const float* dy, float* dx) {
  centered_ ? backward_as<true>(x, dy, dx) : backward_as<false>(x, dy, dx);
}

template <bool centered>
void StreamingRowNorm::forward_as(const float* from, float* to) {
  double* const square = sums_.get();
  double* const sum = square + rows_;
  for (int r = 0; r < rows_; ++r) {
    const float* __restrict const x = from + size_t(r) * own_;
    float s = 0, q = 0;
    for (int i = 0; i < own_; ++i) {
      if constexpr (centered) s += x[i];
      q += x[i] * x[i];
    }
    square[r] = q;
    sum[r] = s;
  }
  sum_over_ranks(square, centered ? 2 * rows_ : rows_);
  const float* __restrict const weight = weight_.get();
  const float* __restrict const bias = bias_.get();
  for (int r = 0; r < rows_; ++r) {
    const double mean = centered ? sum[r] / hidden_ : 0.0;
    center_[r] = float(mean);
    inverse_[r] = float(1 / std::sqrt(square[r] / hidden_ - mean * mean + eps_));
    const float a = inverse_[r], b = -center_[r] * a;
    const float* __restrict const x = from + size_t(r) * own_;
    float* __restrict const y = to + size_t(r) * own_;
    for (int i = 0; i < own_; ++i) {
      if constexpr (centered)
        y[i] = (x[i] * a + b) * weight[i] + bias[i];
      else
        y[i] = x[i] * a * weight[i];
    }
  }
}

template <bool centered>
void StreamingRowNorm::backward_as(const float* from, const float* gradient, float* to) {
  double* const product = sums_.get();  // of the weighted gradient and the normalised x
  double* const sum = product + rows_;  // of the weighted gradient
  const float* __restrict const weight = weight_.get();
  float* __restrict const dweight = dweight_.get();
  float* __restrict const dbias = dbias_.get();
  std::fill(dweight, dweight + own_, 0.0F);
  std::fill(dbias, dbias + own_, 0.0F);
  for (int r = 0; r < rows_; ++r) {
    const float* __restrict const x = from + size_t(r) * own_;
    const float* __restrict const dy = gradient + size_t(r) * own_;
    const float a = inverse_[r], b = -center_[r] * a;
    float s = 0, p = 0;
    for (int i = 0; i < own_; ++i) {
      const float normalised = x[i] * a + b, weighted = dy[i] * weight[i];
      p += weighted * normalised;
      dweight[i] += dy[i] * normalised;
      if constexpr (centered) {
        s += weighted;
        dbias[i] += dy[i];
      }
    }
    product[r] = p;
    sum[r] = s;
  }
  sum_over_ranks(product, centered ? 2 * rows_ : rows_);
  for (int r = 0; r < rows_; ++r) {
    const float* __restrict const x = from + size_t(r) * own_;
    const float* __restrict const dy = gradient + size_t(r) * own_;
    float* __restrict const dx = to + size_t(r) * own_;
    const float a = inverse_[r], b = -center_[r] * a;
    const float mean_product = float(product[r] / hidden_);
    const float mean = centered ? float(sum[r] / hidden_) : 0.0F;
    for (int i = 0; i < own_; ++i)
      dx[i] = a * (dy[i] * weight[i] - mean - (x[i] * a + b) * mean_product);
  }
}

Triad::Triad(size_t length)
    : length_(length), x_(zeros(length)), y_(zeros(length)), z_(zeros(length)) {}

void Triad::run() {
  for (size_t i = 0; i < length_; ++i) z_[i] = x_[i] + 0.5F * y_[i];
  keep(z_.get());
}

}  // namespace syncnorm::bench
