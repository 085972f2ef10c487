// out = W x + b for one x: a memory-bound pass over the rows of W, which the threads share.
//
// Four rows at once keep enough loads in flight for one core. A row's sum is made by one thread, always in the same
// order, so that the result does not depend on the number of threads.

#include <cstdint>
#include <vector>

#include "native.h"

namespace {

constexpr int64_t ROWS = 4;
constexpr int64_t PARALLEL = 1 << 15;  // weights from which on threads are worth waking

template <typename T>
void four(const float* x, const T* a, int64_t size, float* sums) {
  const T *b = a + size, *c = b + size, *d = c + size;
  float s0 = 0, s1 = 0, s2 = 0, s3 = 0;
#pragma omp simd reduction(+ : s0, s1, s2, s3)
  for (int64_t i = 0; i < size; ++i) {
    s0 += x[i] * widen(a[i]);
    s1 += x[i] * widen(b[i]);
    s2 += x[i] * widen(c[i]);
    s3 += x[i] * widen(d[i]);
  }
  sums[0] = s0, sums[1] = s1, sums[2] = s2, sums[3] = s3;
}

template <typename T>
float one(const float* x, const T* a, int64_t size) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < size; ++i) sum += x[i] * widen(a[i]);
  return sum;
}

template <typename T>
void product(const T* given, const T* weight, const T* bias, int64_t rows, int64_t size, int64_t threads, T* out) {
  std::vector<float> wide(size);
  for (int64_t i = 0; i < size; ++i) wide[i] = widen(given[i]);
  const float* x = wide.data();
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && rows * size >= PARALLEL)
  for (int64_t first = 0; first < rows; first += ROWS) {
    float sums[ROWS];
    const int64_t count = rows - first < ROWS ? rows - first : ROWS;
    if (count == ROWS)
      four(x, weight + first * size, size, sums);
    else
      for (int64_t i = 0; i < count; ++i) sums[i] = one(x, weight + (first + i) * size, size);
    for (int64_t i = 0; i < count; ++i) narrow(sums[i] + (bias ? widen(bias[first + i]) : 0.0f), out + first + i);
  }
}

}  // namespace

// x [in], weight [out, in], bias [out] or null, out [out], all of a type (0 float32, 1 bfloat16) and contiguous.
extern "C" void gemv(int64_t type, const void* x, const void* weight, const void* bias, int64_t rows, int64_t size,
                     int64_t threads, void* out) {
  const auto run = [&](auto kind) {
    using T = decltype(kind);
    product(static_cast<const T*>(x), static_cast<const T*>(weight), static_cast<const T*>(bias), rows, size, threads,
            static_cast<T*>(out));
  };
  if (type == 0) run(float());
  if (type == 1) run(BFloat16());
}
