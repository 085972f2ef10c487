// Logits of a block of queries: a register holds several queries, so that it needs no sum of its own numbers.

#pragma once

#include <cmath>

#include "native.h"

constexpr int64_t QUERIES = 4 * LANES;  // of a block; their numbers are [dim][QUERIES]
#if defined(__AVX512F__)
constexpr bool WIDE = true;  // four registers of queries and the sums of four tokens fit beside each other
#else
constexpr bool WIDE = false;
#endif

// s[t][...] = <q, k_t> of R registers of queries, s [T][QUERIES], of N tokens.
template <int R, int N>
inline void dot(const float* q, const float* keys, int64_t dim, float* s) {
  Lanes sums[N][R] = {};
  for (int64_t d = 0; d < dim; ++d) {
    Lanes x[R];
    for (int r = 0; r < R; ++r) x[r] = held(load(q + d * QUERIES + r * LANES));
    for (int n = 0; n < N; ++n) {
      const float key = keys[n * dim + d];
      for (int r = 0; r < R; ++r) sums[n][r] += x[r] * key;
    }
  }
  for (int n = 0; n < N; ++n)
    for (int r = 0; r < R; ++r) store(s + n * QUERIES + r * LANES, sums[n][r]);
}

template <int R>
void dots(const float* q, const float* keys, int64_t count, int64_t dim, float* s) {
  int64_t t = 0;
  for (; t + 4 <= count; t += 4) dot<R, 4>(q, keys + t * dim, dim, s + t * QUERIES);
  for (; t < count; ++t) dot<R, 1>(q, keys + t * dim, dim, s + t * QUERIES);
}

// The same for the registers of `lanes` queries.
inline void dots(int64_t lanes, const float* q, const float* keys, int64_t count, int64_t dim, float* s) {
  int64_t lane = 0;
  if constexpr (WIDE)
    for (; lane + 4 * LANES <= lanes; lane += 4 * LANES) dots<4>(q + lane, keys, count, dim, s + lane);
  for (; lane + 2 * LANES <= lanes; lane += 2 * LANES) dots<2>(q + lane, keys, count, dim, s + lane);
  for (; lane < lanes; lane += LANES) dots<1>(q + lane, keys, count, dim, s + lane);
}

// cap * tanh(x / cap). Near 0, where 1 - e^(-2|x|) would cancel, a polynomial; the relative error is below 1e-6.
inline float bent(float x, float cap) {
  const float y = x / cap, size = std::fabs(y), square = y * y;
  float p = 21844.0f / 6081075;
  p = p * square - 1382.0f / 155925;
  p = p * square + 62.0f / 2835;
  p = p * square - 17.0f / 315;
  p = p * square + 2.0f / 15;
  p = p * square - 1.0f / 3;
  p = p * square + 1.0f;
  const float e = exp_negative(-2 * size), far = std::copysign((1 - e) / (1 + e), y);
  return cap * (size < 0.5f ? y * p : far);
}

// Caps `count` logits.
inline void bend(float* s, int64_t count, float cap) {
#pragma omp simd
  for (int64_t t = 0; t < count; ++t) s[t] = bent(s[t], cap);
}
