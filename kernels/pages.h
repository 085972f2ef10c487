// How the C++ kernels read rows of tokens that lie in the pages of a pool.

#pragma once

#include <algorithm>

#include "native.h"

// Tokens of one page: [start, start + count) of the pool are slots from `offset` on of what is worked on at once.
struct Part {
  int64_t start, count, offset;
};

// What a pool holds of each token in one column: `width` numbers of a type (0 float32, 1 bfloat16, 2 float16), or a code
// of `bits` bits for each, and behind them the scale and the offset (float16) of each group of channels.
struct Column {
  char* data;
  int64_t width, type, bits, group, bytes;  // bytes: of a token
  char* near;                               // [R, places, width] numbers of the type: see Pages

  int64_t number_bytes() const { return type == 0 ? 4 : 2; }
};

// Where the token of a rank lies among so many near ones: the first SINKS stay, others take turns (ag.kernels.codes).
constexpr int64_t SINKS = 1;
inline int64_t near_place(int64_t rank, int64_t places) {
  return rank < SINKS ? rank : SINKS + (rank - SINKS) % (places - SINKS);
}

// Rows in the pages of a pool; what codes stand for lies beside them as it came for the newest and first tokens. Its
// layout is that of ag.kernels.pages.native.
struct Pages {
  Column keys, values;
  int32_t *ranks, *table, *lengths;
  int64_t rows, stride, page;  // stride: from one row of the table to the next
  int32_t* near_ranks;         // [R, places], of what lies there; below 0: nothing
  int64_t places;

  // The largest rank of a row of which all below are not near, sinks aside.
  int32_t far(int64_t row) const {
    int32_t newest = -1;
    for (int64_t n = 0; n < places; ++n)
      newest = near_ranks[row * places + n] > newest ? near_ranks[row * places + n] : newest;
    return newest - static_cast<int32_t>(places - SINKS);
  }

  // Whether some tokens of a part may lie beside the pages: one comparison a token, which compilers put side by side.
  bool some_near(const Part& p, int32_t far) const {
    bool some = false;
    for (int64_t t = 0; places && t < p.count; ++t) some |= (ranks[p.start + t] > far) | (ranks[p.start + t] < SINKS);
    return some;
  }

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

// Numbers of a group of `size` codes, side by side. A byte holds a code of 8 bits, or two of 4 bits: of CODES channels
// those of the first half are the low bits, those of the second half the high ones; fewer at the end alike.
constexpr int64_t CODES = 32;
template <int BITS>
__attribute__((always_inline)) inline void decode(const uint8_t* codes, const char* scales, int64_t size, float* out) {
  Half pair[2];
  std::memcpy(pair, scales, sizeof pair);
  const float scale = widen(pair[0]), offset = widen(pair[1]);
  int64_t d = 0;
  const auto lanes = [&](LaneInts x) { return __builtin_convertvector(x, Lanes) * scale + offset; };
  if constexpr (BITS == 8) {
    for (; d + LANES <= size; d += LANES) store(out + d, lanes(lane_bytes(codes + d)));
    for (; d < size; ++d) out[d] = static_cast<float>(codes[d]) * scale + offset;
  } else {
    for (; d + CODES <= size; d += CODES)
      for (int64_t i = 0; i < CODES / 2; i += LANES) {
        const LaneInts both = lane_bytes(codes + d / 2 + i);
        store(out + d + i, lanes(both & 15));
        store(out + d + CODES / 2 + i, lanes(both >> 4));
      }
    for (int64_t i = 0, half = (size - d + 1) / 2; i < half; ++i) {
      out[d + i] = static_cast<float>(codes[d / 2 + i] & 15) * scale + offset;
      if (d + half + i < size) out[d + half + i] = static_cast<float>(codes[d / 2 + i] >> 4) * scale + offset;
    }
  }
}

// Of tokens; GROUP: of how many channels each scale is where these are all of the tokens' groups, else 0.
template <int BITS, int GROUP>
void decode(const Column& c, const char* tokens, int64_t count, float* out) {
  const int64_t group = GROUP ? GROUP : c.group;
  for (int64_t t = 0; t < count; ++t, tokens += c.bytes, out += c.width) {
    const uint8_t* codes = reinterpret_cast<const uint8_t*>(tokens);
    const char* scales = tokens + (c.width * BITS + 7) / 8;
    for (int64_t d = 0; d < c.width; d += group, scales += 4)
      decode<BITS>(codes + d * BITS / 8, scales, GROUP ? GROUP : std::min(group, c.width - d), out + d);
  }
}

template <int BITS>
void decode(const Column& c, const char* tokens, int64_t count, float* out) {
  if (c.width % c.group == 0 && c.group == 32) decode<BITS, 32>(c, tokens, count, out);
  else if (c.width % c.group == 0 && c.group == 64) decode<BITS, 64>(c, tokens, count, out);
  else decode<BITS, 0>(c, tokens, count, out);
}

// The numbers [count, width] of a part of a row: where they lie, or in `room`.
inline const float* numbers(const Pages& pages, const Column& c, int64_t row, const Part& p, int32_t far, float* room) {
  const char* tokens = c.data + p.start * c.bytes;
  if (!c.bits && c.type == 0) return reinterpret_cast<const float*>(tokens);
  if (!c.bits) {
    widen_all(c.type, tokens, p.count * c.width, room);
    return room;
  }
  if (c.bits == 8) decode<8>(c, tokens, p.count, room);
  else decode<4>(c, tokens, p.count, room);
  if (!pages.some_near(p, far)) return room;
  const int32_t* near = pages.near_ranks + row * pages.places;
  for (int64_t t = 0; t < p.count; ++t) {
    const int64_t rank = pages.ranks[p.start + t], place = near_place(rank, pages.places);
    const char* held = c.near + (row * pages.places + place) * c.width * c.number_bytes();
    if (near[place] == rank) widen_all(c.type, held, c.width, room + t * c.width);
  }
  return room;
}

constexpr int BLOCKS = LANES == 8 ? 2 : 4;  // registers of one query's output that fit beside those of three others

// out[n][...] += sum_t weights[n * QUERY + t * TOKEN] v_t[...], of N queries and B registers of numbers; meanwhile `step`
// bytes a token are fetched from `next` on, where there is something.
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
