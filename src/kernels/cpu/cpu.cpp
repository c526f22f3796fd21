#include <ATen/Parallel.h>

#include <algorithm>
#include <vector>

#include "kernels/cpu/coefficients.h"
#include "kernels/cpu/columns.h"
#include "kernels/cpu/passes.h"

namespace syncnorm::kernels {
namespace {

/// Slots side by side in memory: rows of them are what loops run over.
bool side_by_side(const Norm& norm) {
  return norm.input.layout.inner == 1 && !norm.layout.by_column;
}

loops::Gate gate_of(const Norm& norm) {
  if (!norm.relu) return loops::Gate::open;
  return norm.residual.defined() || norm.output.defined() ? loops::Gate::output
                                                          : loops::Gate::recompute;
}

template <typename T>
void take_moments(const T* x, const CellLayout& in, const NormLayout& layout,
                  const at::Tensor& center, const passes::Addition<T>& addition,
                  const at::Tensor& sums) {
  const auto& loops = loops::of<T>(*loops::capability().tables);
  const auto about = center.defined() ? layout.to_cells(center) : center;
  const std::vector<double> zeros(center.defined() ? 0 : in.cells);
  const auto* centers = center.defined() ? about.const_data_ptr<double>() : zeros.data();
  const auto reach = passes::reach_of<T>(in);
  const auto sum_cells = [&] {
    if (in.inner == 1 && layout.centered && addition.sum == nullptr)
      return passes::sum_rows(
          in, 4,
          [&](int64_t row, int64_t rows, double* first, double* second, auto* scratch) {
            loops.moments_rows(x + row * in.cells, rows, in.cells, centers, first, second, scratch,
                               reach);
          },
          loops::compute_t<T>());
    const auto sum = [&](const T* from, const loops::Runs& runs, double* first, double* second,
                         loops::Reach where) {
      layout.centered ? loops.moments(from, runs, centers, first, second, where)
                      : loops.squares(from, runs, second, where);
    };
    if (addition.sum == nullptr)
      return passes::sum_runs(in, [&](int64_t at, const auto& runs, double* first, double* second) {
        sum(x + at, runs, first, second, reach);
      });
    return passes::sum_runs(in, [&](int64_t at, const auto& runs, double* first, double* second) {
      // One after the other: what was just written is near.
      for (int64_t r = 0; r < runs.count; ++r, at += runs.length) {
        loops.add(x + at, addition.residual + at, runs.length, addition.sum + at, reach);
        sum(addition.sum + at, runs.one(r), first + r, second + r, loops::Reach::near);
      }
    });
  };
  passes::fold(sum_cells(), layout, layout.share, static_cast<double*>(nullptr), sums);
}

template <typename T>
void backward_sums_by_column(const Norm& norm, const at::Tensor& dy, const at::Tensor& of_slots,
                             const at::Tensor& of_affine) {
  using A = loops::compute_t<T>;
  const Values<A> weight(norm.weight);
  const CellCoefficients<A> k(norm);
  const auto of_cells = passes::sum_columns<T>(
      passes::data<T>(norm.input.data), passes::data<T>(dy), norm.layout, weight.data(),
      [&](int64_t cell) { return k[cell]; }, norm.bias.defined(), of_affine);
  passes::fold(of_cells, norm.layout, {}, static_cast<A*>(nullptr), of_slots);
}

template <typename T>
void backward_sums_by_cell(const Norm& norm, const at::Tensor& dy, const at::Tensor& of_slots,
                           const at::Tensor& of_affine) {
  using A = loops::compute_t<T>;
  const auto& loops = loops::of<T>(*loops::capability().tables);
  const auto& in = norm.input.layout;
  const auto* x = passes::data<T>(norm.input.data);
  const auto* g = passes::data<T>(dy);
  const auto* out = passes::data<T>(norm.output);
  const auto gate = gate_of(norm);
  const CellCoefficients<A> k(norm);
  const auto reach = passes::reach_of<T>(in);
  const auto sum_cells = [&] {
    if (side_by_side(norm))
      return passes::sum_rows(
          in, 2,
          [&](int64_t row, int64_t rows, double* first, double* second, A* scratch) {
            const int64_t at = row * in.cells;
            loops.backward_sums_rows(x + at, g + at, passes::advance(out, at), rows, in.cells,
                                     k.arrays(), gate, first, second, scratch, reach);
          },
          A());
    return passes::sum_runs(in, [&](int64_t at, const auto& runs, double* first, double* second) {
      loops.backward_sums(x + at, g + at, passes::advance(out, at), runs, k.arrays(), gate, first,
                          second, reach);
    });
  };
  const auto of_cells = sum_cells();
  if (of_affine.defined()) passes::fold_affine(of_cells, norm.layout, of_affine);
  passes::fold(of_cells, norm.layout, {}, Values<A>(norm.weight).data(), of_slots);
}

template <typename T>
void apply_norm(const Norm& norm, const at::Tensor& y) {
  using A = loops::compute_t<T>;
  const auto& loops = loops::of<T>(*loops::capability().tables);
  const auto& in = norm.input.layout;
  const auto* x = passes::data<T>(norm.input.data);
  const auto* residual = passes::data<T>(norm.residual);
  auto* to = passes::mutable_data<T>(y);
  const CellCoefficients<A> k(norm);
  const auto reach = passes::reach_of<T>(in);
  if (norm.layout.by_column) {
    const Values<A> weight(norm.weight), bias(norm.bias);
    passes::for_rows_by_column(
        norm.layout, k, [&](int64_t at, int64_t rows, const auto* of_rows, int64_t column) {
          loops.apply_columns(x + at, rows, in.inner, of_rows,
                              passes::advance(weight.data(), column),
                              passes::advance(bias.data(), column), to + at, reach);
        });
  } else if (side_by_side(norm)) {
    passes::for_rows(in, [&](int64_t at, int64_t rows) {
      loops.apply_rows(x + at, passes::advance(residual, at), rows, in.cells, k.arrays(), norm.relu,
                       to + at, reach);
    });
  } else {
    passes::for_runs(in, [&](int64_t at, const loops::Runs& runs) {
      loops.apply(x + at, passes::advance(residual, at), runs, k.arrays(), norm.relu, to + at,
                  reach);
    });
  }
}

template <typename T>
void apply_backward(const Norm& norm, const at::Tensor& dy, const at::Tensor& sums,
                    const SlotCount& count, const BackwardOutputs& outputs) {
  using A = loops::compute_t<T>;
  const auto& loops = loops::of<T>(*loops::capability().tables);
  const auto& in = norm.input.layout;
  const auto* x = passes::data<T>(norm.input.data);
  const auto* g = passes::data<T>(dy);
  const auto* out = passes::data<T>(norm.output);
  const auto* extra = passes::data<T>(outputs.extra);
  auto* dx = passes::mutable_data<T>(outputs.dx);
  auto* dresidual = passes::mutable_data<T>(outputs.dresidual);
  const auto gate = gate_of(norm);
  const CellCoefficients<A> k(norm, sums, count);
  const auto reach = passes::reach_of<T>(in);
  if (norm.layout.by_column) {
    const Values<A> weight(norm.weight);
    passes::for_rows_by_column(
        norm.layout, k, [&](int64_t at, int64_t rows, const auto* of_rows, int64_t column) {
          loops.backward_apply_columns(x + at, g + at, rows, in.inner, of_rows,
                                       passes::advance(weight.data(), column),
                                       passes::advance(extra, at), dx + at, reach);
        });
  } else if (side_by_side(norm)) {
    passes::for_rows(in, [&](int64_t at, int64_t rows) {
      loops.backward_apply_rows(x + at, g + at, passes::advance(out, at), rows, in.cells,
                                k.arrays(), gate, passes::advance(dx, at),
                                passes::advance(dresidual, at), reach);
    });
  } else {
    passes::for_runs(in, [&](int64_t at, const loops::Runs& runs) {
      loops.backward_apply(x + at, g + at, passes::advance(out, at), runs, k.arrays(), gate,
                           passes::advance(dx, at), passes::advance(dresidual, at), reach);
    });
  }
}

class CpuKernels final : public KernelSet {
 public:
  at::Tensor center(const at::Tensor& running_mean) const override {
    return finite_center(running_mean);
  }

  void moments(const NormInput& x, const NormLayout& layout, const at::Tensor& center,
               const at::Tensor& sums) const override {
    passes::dispatch(x.data, [&](auto zero) {
      using T = decltype(zero);
      take_moments<T>(passes::data<T>(x.data), x.layout, layout, center, {}, sums);
    });
  }

  void add_and_moments(const at::Tensor& x, const at::Tensor& residual, const NormInput& sum,
                       const NormLayout& layout, const at::Tensor& center,
                       const at::Tensor& sums) const override {
    passes::dispatch(x, [&](auto zero) {
      using T = decltype(zero);
      take_moments<T>(passes::data<T>(x), sum.layout, layout, center,
                      {passes::data<T>(residual), passes::mutable_data<T>(sum.data)}, sums);
    });
  }

  bool finish(const at::Tensor& sums, const NormLayout& layout, const at::Tensor& center,
              const SlotCount& count, const Precision& precision,
              const at::Tensor& statistics) const override {
    return finish_statistics(sums, layout, center, count, precision, statistics);
  }

  void update_running(const at::Tensor& statistics, double count, double momentum,
                      const at::Tensor& running_mean,
                      const at::Tensor& running_var) const override {
    update_running_statistics(statistics, count, momentum, running_mean, running_var);
  }

  void apply(const Norm& norm, const at::Tensor& y) const override {
    passes::dispatch(y, [&](auto zero) { apply_norm<decltype(zero)>(norm, y); });
  }

  void backward_sums(const Norm& norm, const at::Tensor& dy, const at::Tensor& of_slots,
                     const at::Tensor& of_affine) const override {
    passes::dispatch(dy, [&](auto zero) {
      using T = decltype(zero);
      norm.layout.by_column ? backward_sums_by_column<T>(norm, dy, of_slots, of_affine)
                            : backward_sums_by_cell<T>(norm, dy, of_slots, of_affine);
    });
  }

  at::Tensor affine_gradient(const at::Tensor& of_affine, int64_t row,
                             const at::Tensor& parameter) const override {
    return gradient_of_affine(of_affine, row, parameter);
  }

  void backward_apply(const Norm& norm, const at::Tensor& dy, const at::Tensor& sums,
                      const SlotCount& count, const BackwardOutputs& outputs) const override {
    passes::dispatch(
        dy, [&](auto zero) { apply_backward<decltype(zero)>(norm, dy, sums, count, outputs); });
  }
};

}  // namespace

const KernelSet& cpu_kernels() {
  static const CpuKernels set;
  return set;
}

}  // namespace syncnorm::kernels
