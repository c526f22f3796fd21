#include <ATen/Parallel.h>

#include <algorithm>
#include <vector>

#include "kernels/cpu/loops.h"
#include "kernels/kernels.h"

namespace syncnorm::kernels {
namespace {

// A task's share: enough work to outweigh starting it.
constexpr int64_t kGrain = 32 * 1024;

// Elements summed between two roundings to the shared partials, fixed so that results do not depend
// on the thread count.
constexpr int64_t kBlock = 64 * 1024;

int64_t grain_of_runs(int64_t inner) {
  return std::max<int64_t>(1, kGrain / std::max<int64_t>(inner, 1));
}

/// Runs `sum(offset, center) -> loops::Sums` over every (outer, slot) run and adds the runs of a
/// slot in order.
template <typename F>
at::Tensor sum_runs(const SlotLayout& layout, const at::Tensor& center, F&& sum) {
  const int64_t runs = layout.outer * layout.slots;
  std::vector<loops::Sums> partial(runs);
  const auto* centers = center.const_data_ptr<double>();
  at::parallel_for(0, runs, grain_of_runs(layout.inner), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r)
      partial[r] = sum(r * layout.inner, centers[r % layout.slots]);
  });
  auto result = at::zeros({2, layout.slots}, at::kDouble);
  auto* first = result.data_ptr<double>();
  auto* second = first + layout.slots;
  for (int64_t r = 0; r < runs; ++r) {
    first[r % layout.slots] += partial[r].first;
    second[r % layout.slots] += partial[r].second;
  }
  return result;
}

/// Runs `sum(first_row, rows, first, second)` over blocks of rows and adds the blocks in order.
template <typename F>
at::Tensor sum_rows(const SlotLayout& layout, F&& sum) {
  const int64_t rows_each = std::max<int64_t>(1, kBlock / std::max<int64_t>(layout.slots, 1));
  const int64_t blocks = (layout.outer + rows_each - 1) / rows_each;
  const auto partial = at::zeros({blocks, 2, layout.slots}, at::kDouble);
  auto* sums = partial.data_ptr<double>();
  at::parallel_for(0, blocks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      auto* first = sums + b * 2 * layout.slots;
      sum(b * rows_each, std::min(rows_each, layout.outer - b * rows_each), first,
          first + layout.slots);
    }
  });
  return blocks == 1 ? partial[0] : partial.sum(0);
}

template <typename F>
void for_runs(const SlotLayout& layout, F&& body) {
  at::parallel_for(0, layout.outer * layout.slots, grain_of_runs(layout.inner),
                   [&](int64_t begin, int64_t end) {
                     for (int64_t r = begin; r < end; ++r) body(r * layout.inner, r % layout.slots);
                   });
}

template <typename F>
void for_rows(const SlotLayout& layout, F&& body) {
  at::parallel_for(0, layout.outer, grain_of_runs(layout.slots),
                   [&](int64_t begin, int64_t end) { body(begin * layout.slots, end - begin); });
}

template <typename T>
const T* data_or_null(const at::Tensor& values) {
  return values.defined() ? values.const_data_ptr<T>() : nullptr;
}

template <typename T>
const T* advance(const T* values, int64_t by) {
  return values == nullptr ? nullptr : values + by;
}

/// The sums of every slot, and in the same pass those of every column: blocks of slots add up
/// columns of their own, and the blocks are added in order.
template <typename T>
BackwardSums sum_columns(const T* x, const T* dy, const SlotLayout& layout,
                         const at::Tensor& affine, const Columns& columns) {
  constexpr int64_t kMostBlocks = 64;  // bounds the memory of the columns' partial sums
  const int64_t slots = layout.slots, inner = layout.inner;
  const int64_t each = std::max(
      {int64_t{1}, kBlock / std::max<int64_t>(inner, 1), (slots + kMostBlocks - 1) / kMostBlocks});
  const int64_t blocks = (slots + each - 1) / each;
  const auto partial = at::zeros({blocks, 2, columns.rows, inner}, at::kDouble);
  BackwardSums result;
  result.slots = at::empty({2, slots}, at::kDouble);
  auto* sums = partial.data_ptr<double>();
  auto* first = result.slots.data_ptr<double>();
  const auto* k = affine.const_data_ptr<double>();
  const auto* weight = data_or_null<T>(columns.weight);
  const int64_t width = columns.rows * inner;
  at::parallel_for(0, blocks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b)
      for (int64_t s = b * each; s < std::min(slots, (b + 1) * each); ++s) {
        const int64_t column = s % columns.rows * inner;
        auto* dweight = sums + b * 2 * width + column;
        const auto sum = loops::backward_sums_columns(
            x + s * inner, dy + s * inner, inner, {k[s], k[slots + s], k[2 * slots + s]},
            advance(weight, column), dweight, dweight + width);
        first[s] = sum.first;
        first[slots + s] = sum.second;
      }
  });
  result.columns = partial.sum(0);
  return result;
}

template <typename F>
void dispatch(const at::Tensor& x, F&& body) {
  if (x.scalar_type() == at::kDouble) return body(double());
  TORCH_INTERNAL_ASSERT(x.scalar_type() == at::kFloat);
  body(float());
}

class CpuKernels final : public KernelSet {
 public:
  at::Tensor moments(const at::Tensor& x, const SlotLayout& layout,
                     const at::Tensor& center) const override {
    at::Tensor result;
    dispatch(x, [&](auto zero) {
      using T = decltype(zero);
      const auto* data = x.const_data_ptr<T>();
      if (layout.inner == 1) {
        const auto* centers = center.const_data_ptr<double>();
        result = sum_rows(layout, [&](int64_t row, int64_t rows, double* first, double* second) {
          loops::moments_rows(data + row * layout.slots, rows, layout.slots, centers, first,
                              second);
        });
      } else {
        result = sum_runs(layout, center, [&](int64_t at, double c) {
          return loops::moments(data + at, layout.inner, c);
        });
      }
    });
    return result;
  }

  BackwardSums backward_sums(const at::Tensor& x, const at::Tensor& dy, const SlotLayout& layout,
                             const at::Tensor& affine, const Columns& columns) const override {
    BackwardSums result;
    dispatch(x, [&](auto zero) {
      using T = decltype(zero);
      const auto* data = x.const_data_ptr<T>();
      const auto* gradient = dy.const_data_ptr<T>();
      const auto* centers = affine.const_data_ptr<double>();
      if (columns.any()) {
        result = sum_columns(data, gradient, layout, affine, columns);
      } else if (layout.inner == 1) {
        result.slots =
            sum_rows(layout, [&](int64_t row, int64_t rows, double* first, double* second) {
              const int64_t at = row * layout.slots;
              loops::backward_sums_rows(data + at, gradient + at, rows, layout.slots, centers,
                                        first, second);
            });
      } else {
        result.slots = sum_runs(layout, affine[0], [&](int64_t at, double c) {
          return loops::backward_sums(data + at, gradient + at, layout.inner, c);
        });
      }
    });
    return result;
  }

  void apply(const at::Tensor& x, const SlotLayout& layout, const at::Tensor& coefficients,
             const Columns& columns, const at::Tensor& y) const override {
    dispatch(x, [&](auto zero) {
      using T = decltype(zero);
      const auto* from = x.const_data_ptr<T>();
      const auto* k = coefficients.const_data_ptr<T>();
      auto* to = y.data_ptr<T>();
      const int64_t n = layout.slots;
      if (columns.any()) {
        const auto* weight = data_or_null<T>(columns.weight);
        const auto* bias = data_or_null<T>(columns.bias);
        for_runs(layout, [&](int64_t at, int64_t s) {
          const int64_t column = s % columns.rows * layout.inner;
          loops::apply_columns(from + at, layout.inner, k[s], k[n + s], k[2 * n + s],
                               advance(weight, column), advance(bias, column), to + at);
        });
      } else if (layout.inner == 1) {
        for_rows(layout, [&](int64_t at, int64_t rows) {
          loops::apply_rows(from + at, rows, n, k, to + at);
        });
      } else {
        for_runs(layout, [&](int64_t at, int64_t s) {
          loops::apply(from + at, layout.inner, k[s], k[n + s], k[2 * n + s], to + at);
        });
      }
    });
  }

  void backward_apply(const at::Tensor& x, const at::Tensor& dy, const SlotLayout& layout,
                      const at::Tensor& coefficients, const Columns& columns,
                      const at::Tensor& dx) const override {
    dispatch(x, [&](auto zero) {
      using T = decltype(zero);
      const auto* from = x.const_data_ptr<T>();
      const auto* gradient = dy.const_data_ptr<T>();
      const auto* k = coefficients.const_data_ptr<T>();
      auto* to = dx.data_ptr<T>();
      const int64_t n = layout.slots;
      if (layout.inner == 1 && !columns.any()) {
        for_rows(layout, [&](int64_t at, int64_t rows) {
          loops::backward_apply_rows(from + at, gradient + at, rows, n, k, to + at);
        });
        return;
      }
      const auto* weight = data_or_null<T>(columns.weight);
      for_runs(layout, [&](int64_t at, int64_t s) {
        const loops::BackwardCoefficients<T> mine{k[s], k[n + s], k[2 * n + s], k[3 * n + s],
                                                  k[4 * n + s]};
        if (weight == nullptr) {
          loops::backward_apply(from + at, gradient + at, layout.inner, mine, to + at);
        } else {
          loops::backward_apply_columns(from + at, gradient + at, layout.inner, mine,
                                        weight + s % columns.rows * layout.inner, to + at);
        }
      });
    });
  }
};

}  // namespace

const KernelSet& cpu_kernels() {
  static const CpuKernels set;
  return set;
}

}  // namespace syncnorm::kernels
