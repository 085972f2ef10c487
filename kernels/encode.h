// How the numbers of a token become codes.

#pragma once

#include <algorithm>
#include <cmath>

#include "pages.h"

// The bytes of a token's codes; see ag.kernels.codes.Codes.
inline void encode(const Column& c, const float* x, char* token) {
  constexpr float LARGEST = 65504, STEPS = 255;
  char* pairs = token + c.width;
  for (int64_t first = 0; first < c.width; first += GROUP, pairs += 4) {
    const int64_t end = std::min(first + GROUP, c.width);
    float least = LARGEST, most = -LARGEST, none = 0;  // NaN where a number is not finite, which then all are
    for (int64_t d = first; d < end; ++d) {
      none += 0 * x[d];
      least = std::min(least, x[d]);
      most = std::max(most, x[d]);
    }
    Half pair[2];  // scale and offset
    narrow(std::max(least, -LARGEST) + none, &pair[1]);
    const float offset = widen(pair[1]);
    narrow((std::min(most, LARGEST) - offset) / STEPS + 0.0f, &pair[0]);
    const float scale = widen(pair[0]), per_step = scale > 0 ? 1 / scale : 0;
    std::memcpy(pairs, pair, sizeof pair);
    for (int64_t d = first; d < end; ++d) {
      const float number = std::max(-LARGEST, std::min(x[d], LARGEST));
      const float nearest = std::nearbyint((number - offset) * per_step);
      token[d] = static_cast<char>(static_cast<uint8_t>(std::max(0.0f, std::min(nearest, STEPS))));
    }
  }
}
