#pragma once

#include <cstddef>
#include <memory>

/// What a processor does on this machine when nothing but the arithmetic is asked of it: plain
/// loops over float arrays and one MPI_Allreduce each way, without a framework. A floor to compare
/// with in the same run, not a norm to train with: sums are float within a plane or row, and of
/// values about zero.
namespace syncnorm::bench {

using Floats = std::unique_ptr<float[]>;

/// Batch norm of [n, c, plane] in that memory order, statistics over all ranks.
class StreamingBatchNorm {
 public:
  /// Copies the arrays x, dy [n, c, plane] and weight, bias [c].
  StreamingBatchNorm(int n, int c, int plane, const float* x, const float* dy, const float* weight,
                     const float* bias, double eps);
  ~StreamingBatchNorm();

  /// Forward and backward over its own arrays: y, dx [n, c, plane]; dweight, dbias [c], this rank's
  /// sums.
  void run();

  /// The same over the caller's arrays; dweight and dbias stay here.
  void forward(const float* x, float* y);
  void backward(const float* x, const float* dy, float* dx);

  const float* y() const { return y_.get(); }
  const float* dx() const { return dx_.get(); }
  const float* dweight() const { return dweight_.get(); }
  const float* dbias() const { return dbias_.get(); }

 private:
  int n_, c_, plane_;
  double eps_, count_ = 0;
  Floats x_, dy_, weight_, bias_, y_, dx_, dweight_, dbias_;
  Floats inverse_, center_;  // 1 / deviation and mean of each channel
  std::unique_ptr<double[]> sums_;
};

/// Layer or RMS norm of rows [rows, own], own of `hidden` columns on this rank.
class StreamingRowNorm {
 public:
  /// Copies x, dy [rows, own] and weight, bias [own]; an RMS norm (centered false) has no bias.
  StreamingRowNorm(bool centered, int rows, int own, int hidden, const float* x, const float* dy,
                   const float* weight, const float* bias, double eps);
  ~StreamingRowNorm();

  /// Forward and backward over its own arrays: y, dx [rows, own]; dweight, dbias [own].
  void run();

  /// The same over the caller's arrays; dweight and dbias stay here.
  void forward(const float* x, float* y);
  void backward(const float* x, const float* dy, float* dx);

  const float* y() const { return y_.get(); }
  const float* dx() const { return dx_.get(); }
  const float* dweight() const { return dweight_.get(); }
  const float* dbias() const { return dbias_.get(); }

 private:
  template <bool centered>
  void forward_as(const float* x, float* y);
  template <bool centered>
  void backward_as(const float* x, const float* dy, float* dx);

  bool centered_;
  int rows_, own_, hidden_;
  double eps_;
  Floats x_, dy_, weight_, bias_, y_, dx_, dweight_, dbias_;
  Floats inverse_, center_;  // of each row
  std::unique_ptr<double[]> sums_;
};

/// The STREAM triad (McCalpin 1995) of `length` floats, z = x + factor * y: two words read and one
/// written for each element.
class Triad {
 public:
  explicit Triad(size_t length);
  void run();

 private:
  size_t length_;
  Floats x_, y_, z_;
};

}  // namespace syncnorm::bench
