// out = W x + b for one x: a memory-bound pass over the rows of W, which the threads share.
//
// A thread reads its rows in the order of memory and prefetches. One thread sums a row, always in the same order, so
// that the result does not depend on the number of threads.

#include <cstdint>
#include <vector>

#include "native.h"

namespace {

constexpr int64_t PARALLEL = 1 << 15;  // least number of weights for which several threads start
constexpr int64_t AHEAD = 4096;        // bytes
constexpr int SUMS = 4;                // independent registers

template <typename T>
float product(const float* x, const T* row, int64_t size) {
  Lanes sums[SUMS] = {};
  int64_t i = 0;
  for (; i + SUMS * LANES <= size; i += SUMS * LANES) {
    fetch(reinterpret_cast<const char*>(row + i) + AHEAD, SUMS * LANES * sizeof(T));
    for (int n = 0; n < SUMS; ++n) sums[n] += load(x + i + n * LANES) * load(row + i + n * LANES);
  }
  Lanes all = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  for (; i + LANES <= size; i += LANES) all += load(x + i) * load(row + i);
  float sum = total(all);
  for (; i < size; ++i) sum += x[i] * widen(row[i]);
  return sum;
}

template <typename T>
void products(const T* given, const T* weight, const T* bias, int64_t rows, int64_t size, int64_t threads, T* out) {
  std::vector<float> wide(size);
  for (int64_t i = 0; i < size; ++i) wide[i] = widen(given[i]);
  const float* x = wide.data();
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && rows * size >= PARALLEL)
  for (int64_t row = 0; row < rows; ++row)
    narrow(product(x, weight + row * size, size) + (bias ? widen(bias[row]) : 0.0f), out + row);
}

}  // namespace

// x [in], weight [out, in], bias [out] or null, out [out], all of a type (0 float32, 1 bfloat16) and contiguous.
extern "C" void gemv(int64_t type, const void* x, const void* weight, const void* bias, int64_t rows, int64_t size,
                     int64_t threads, void* out) {
  const auto run = [&](auto kind) {
    using T = decltype(kind);
    products(static_cast<const T*>(x), static_cast<const T*>(weight), static_cast<const T*>(bias), rows, size, threads,
             static_cast<T*>(out));
  };
  if (type == 0) run(float());
  if (type == 1) run(BFloat16());
}
