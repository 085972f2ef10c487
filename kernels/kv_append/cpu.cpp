// Appending of new tokens, or their codes, to rows in blocks.
//
// Plain C at the border, so that it compiles in a second or two, without the headers of PyTorch.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "pages.h"

namespace {

// Write the codes of a token; see ag.kernels.codes.Codes.
void encode(const Column& c, const float* x, char* token) {
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

// Write the token `fresh` to place `at` of a column; `room` is memory for its numbers in float32.
void put(const Column& c, const char* fresh, int64_t at, std::vector<float>& room) {
  char* token = c.data + at * c.bytes;
  if (!c.coded) {  // of any type
    std::memcpy(token, fresh, c.bytes);
    return;
  }
  room.resize(c.width);
  widen_all(c.type, fresh, c.width, room.data());
  encode(c, room.data(), token);
}

}  // namespace

// k, v [B, heads, T, ...] with strides in bytes (three of k, three of v), contiguous in the last dimension; gate_values
// [B, heads, T] of `gate_bytes` each, null without a gate column; token_indices [B, T], below 0 if a token is not
// written.
extern "C" void kv_append(const Pages* into, char* gate, int64_t gate_bytes, const char* k, const char* v,
                          const int64_t* strides, const char* gate_values, const int64_t* token_indices, int64_t heads,
                          int64_t tokens, int64_t threads) {
  const Pages& pages = *into;
  const int64_t some = pages.rows * tokens < 1024 ? 1 : threads;  // starting threads costs more than few copies
#pragma omp parallel for num_threads(some) schedule(static)
  for (int64_t row = 0; row < pages.rows; ++row) {
    std::vector<float> room;
    const int64_t b = row / heads, h = row % heads;
    int64_t length = pages.lengths[row];
    for (int64_t t = 0; t < tokens; ++t) {
      const int64_t token_index = token_indices[b * tokens + t];
      if (token_index < 0) continue;
      const int64_t at = pages.part(row, length, length + 1, 0).start;
      put(pages.keys, k + b * strides[0] + h * strides[1] + t * strides[2], at, room);
      put(pages.values, v + b * strides[3] + h * strides[4] + t * strides[5], at, room);
      pages.token_indices[at] = static_cast<int32_t>(token_index);
      if (gate) std::memcpy(gate + at * gate_bytes, gate_values + (row * tokens + t) * gate_bytes, gate_bytes);
      ++length;
    }
    pages.lengths[row] = static_cast<int32_t>(length);
  }
}
