// What the softmax of some models has beside scaled products.

#pragma once

#include <cmath>

#include "native.h"

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
