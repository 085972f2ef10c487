// Rows of tokens in the pages of a pool.

#pragma once

#include <algorithm>

#include "native.h"

// Tokens of one page: [start, start + count) of the pool are slots from `offset` on of the current piece of a row.
struct Part {
  int64_t start, count, offset;
};

constexpr int64_t GROUP = 64;  // channels that share a scale and an offset (ag.kernels.codes)

// A column of a pool: of each token `width` numbers of a type (0 float32, 1 bfloat16, 2 float16), or a code of 8 bits
// for each, followed by the scale and the offset (float16) of each group of channels.
struct Column {
  char* data;
  int64_t width, type, coded, bytes;  // bytes: of a token

  int64_t number_bytes() const { return type == 0 ? 4 : 2; }
};

// Rows in the pages of a pool. Its layout is that of ag.kernels.pages.Pages.native.
struct Pages {
  Column keys, values;
  int32_t *token_indices, *table, *lengths;
  int64_t rows, stride, page;  // stride: from one row of the table to the next

  Part part(int64_t row, int64_t slot, int64_t end, int64_t begin) const {
    const int64_t count = page - slot % page < end - slot ? page - slot % page : end - slot;
    return {table[row * stride + slot / page] * page + slot % page, count, slot - begin};
  }
};

template <typename T>
inline void widen_all(const T* x, int64_t size, float* out) {
  int64_t d = 0;
  for (; d + LANES <= size; d += LANES) store(out + d, load(x + d));
  for (; d < size; ++d) out[d] = widen(x[d]);
}

inline void widen_all(int64_t type, const char* x, int64_t size, float* out) {
  if (type == 0) std::memcpy(out, x, size * sizeof(float));
  if (type == 1) widen_all(reinterpret_cast<const BFloat16*>(x), size, out);
  if (type == 2) widen_all(reinterpret_cast<const Half*>(x), size, out);
}

// Numbers of the codes of tokens.
inline void decode(const Column& c, const char* tokens, int64_t count, float* out) {
  for (int64_t t = 0; t < count; ++t, tokens += c.bytes, out += c.width) {
    const uint8_t* codes = reinterpret_cast<const uint8_t*>(tokens);
    const char* pairs = tokens + c.width;
    for (int64_t first = 0; first < c.width; first += GROUP, pairs += 4) {
      Half pair[2];
      std::memcpy(pair, pairs, sizeof pair);
      const float scale = widen(pair[0]), offset = widen(pair[1]);
      const int64_t end = std::min(first + GROUP, c.width);
      int64_t d = first;
      for (; d + LANES <= end; d += LANES)
        store(out + d, __builtin_convertvector(lane_bytes(codes + d), Lanes) * scale + offset);
      for (; d < end; ++d) out[d] = static_cast<float>(codes[d]) * scale + offset;
    }
  }
}

// The numbers [count, width] of a part of a row: in place, or decoded into `room`.
inline const float* numbers(const Column& c, const Part& p, float* room) {
  const char* tokens = c.data + p.start * c.bytes;
  if (!c.coded && c.type == 0) return reinterpret_cast<const float*>(tokens);
  if (c.coded) decode(c, tokens, p.count, room);
  else widen_all(c.type, tokens, p.count * c.width, room);
  return room;
}

constexpr int BLOCKS = LANES == 8 ? 2 : 4;  // registers of one query's output that fit beside those of three others

// out[n][...] += sum_t weights[n * QUERY + t * TOKEN] v_t[...], of N queries and B registers of numbers; meanwhile
// `step` bytes a token are prefetched from `next` on, unless it is null.
template <int N, int64_t QUERY, int64_t TOKEN, int B>
static void mix_block(const float* weights, const float* values, int64_t count, int64_t width, float* out,
                      const char* next, int64_t step) {
  Lanes mixed[N][B];
  for (int n = 0; n < N; ++n)
    for (int b = 0; b < B; ++b) mixed[n][b] = load(out + n * width + b * LANES);
  for (int64_t t = 0; t < count; ++t) {
    if (next) fetch(next + t * step, step);
    for (int b = 0; b < B; ++b) {
      const Lanes v = held(load(values + t * width + b * LANES));
      for (int n = 0; n < N; ++n) mixed[n][b] += weights[n * QUERY + t * TOKEN] * v;
    }
  }
  for (int n = 0; n < N; ++n)
    for (int b = 0; b < B; ++b) store(out + n * width + b * LANES, mixed[n][b]);
}

// The same of all numbers.
template <int N, int64_t QUERY, int64_t TOKEN>
static void mix(const float* weights, const float* values, int64_t count, int64_t width, float* out,
                const char* next = nullptr, int64_t step = 0) {
  int64_t d = 0;
  for (; d + BLOCKS * LANES <= width; d += BLOCKS * LANES, next = nullptr)
    mix_block<N, QUERY, TOKEN, BLOCKS>(weights, values + d, count, width, out + d, next, step);
  for (; d + LANES <= width; d += LANES, next = nullptr)
    mix_block<N, QUERY, TOKEN, 1>(weights, values + d, count, width, out + d, next, step);
  for (; d < width; ++d)
    for (int n = 0; n < N; ++n)
      for (int64_t t = 0; t < count; ++t)
        out[n * width + d] += weights[n * QUERY + t * TOKEN] * values[t * width + d];
}
