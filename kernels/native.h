// What the C++ kernels share.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

inline float as_float(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

// e^x for x <= 0, relative error below 1e-6: 2^n times a polynomial on [-log(2)/2, log(2)/2]. Below -87, where numbers
// become subnormal, it is 0.
inline float exp_negative(float x) {
  const float n = std::nearbyint((x > -87.0f ? x : -87.0f) * 1.44269504f);  // of NaN too, for the cast below
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.0f / 5040;
  p = p * r + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  return x < -87.0f ? 0.0f : p * as_float(static_cast<uint32_t>(static_cast<int32_t>(n) + 127) << 23);
}
