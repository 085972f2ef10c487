// Products with codes that are decoded in registers.
//
// If a token has one scale and one offset, sum_d q_d (offset + scale c_d) is scale sum_d q_d c_d + offset sum_d q_d, so
// that both are applied to a sum and not to each channel. Otherwise each number is decoded first.

#pragma once

#include "pages.h"

// Tokens of one column, of WIDTH channels in codes, GROUP of which share a scale and an offset.
template <int WIDTH>
struct Codes {
  static constexpr int GROUPS = WIDTH / GROUP;
  static constexpr int64_t MOST = 64;  // tokens whose weights are scaled at once
  const char* tokens;
  int64_t bytes;  // of a token
  float* pairs;   // [count, GROUPS, 2], scales and offsets, with room for three tokens more

  // Widen the scales and offsets.
  void split(int64_t count) const {
    for (int64_t t = 0; t < count; ++t) {
      const char* halves = tokens + t * bytes + WIDTH;
      float* pair = pairs + t * GROUPS * 2;
      constexpr int SOME = GROUPS == 1 ? 2 : 4;
      for (int64_t i = 0; i < GROUPS * 2; i += SOME) widen_some<SOME>(halves + 2 * i, pair + i);
    }
  }

  // LANES codes of a token from channel d on, as floats.
  __attribute__((always_inline)) Lanes at(int64_t t, int64_t d) const {
    const uint8_t* codes = reinterpret_cast<const uint8_t*>(tokens + t * bytes);
    return __builtin_convertvector(lane_bytes(codes + d), Lanes);
  }
};

// scores[n * ROW + t] = <q_n, k_t>, of N queries; meanwhile `step` bytes a token are prefetched from `next` on, unless
// it is null. Not inlined, because compilers unroll these loops only in a separate function.
template <int N, int64_t ROW, int WIDTH>
__attribute__((noinline)) void dot(const float* q, const Codes<WIDTH>& keys, int64_t count, float* scores,
                                   const char* next, int64_t step) {
  constexpr int GROUPS = WIDTH / GROUP;
  float whole[N];  // sums of the queries' channels
  for (int n = 0; n < N && GROUPS == 1; ++n) {
    Lanes sum = load(q + n * WIDTH);
    for (int64_t d = LANES; d < WIDTH; d += LANES) sum += load(q + n * WIDTH + d);
    whole[n] = total(sum);
  }
  for (int64_t t = 0; t < count; t += 4) {
    if (next) fetch(next + t * step, 4 * step);
    Lanes sums[N][4] = {};
#pragma GCC unroll 4
    for (int g = 0; g < GROUPS; ++g)
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        const int64_t token = t + i < count ? t + i : count - 1;
        const float* pair = keys.pairs + (token * GROUPS + g) * 2;
#pragma GCC unroll 16
        for (int64_t d = g * GROUP; d < (g + 1) * GROUP; d += LANES) {
          Lanes k = keys.at(token, d);
          if constexpr (GROUPS > 1) k = k * pair[0] + pair[1];
          k = held(k);
          for (int n = 0; n < N; ++n) sums[n][i] += load(q + n * WIDTH + d) * k;
        }
      }
    for (int n = 0; n < N; ++n) {
      Four four = totals(sums[n]);
      if constexpr (GROUPS == 1) {
        Four a, b;
        std::memcpy(&a, keys.pairs + 2 * t, sizeof a);
        std::memcpy(&b, keys.pairs + 2 * t + 4, sizeof b);
        four = four * SHUFFLED(a, b, 0, 2, 4, 6) + SHUFFLED(a, b, 1, 3, 5, 7) * whole[n];
      }
      float* to = scores + n * ROW + t;
      if (t + 4 <= count) std::memcpy(to, &four, sizeof four);
      else
        for (int i = 0; t + i < count; ++i) to[i] = four[i];
    }
  }
}

// out[n][...] += sum_t weights[n * ROW + t] v_t[...], of N queries; prefetches like `dot`.
template <int N, int64_t ROW, int WIDTH>
__attribute__((noinline)) void mix(const float* weights, const Codes<WIDTH>& values, int64_t count,
                                   float* out, const char* next, int64_t step) {
  constexpr int64_t AT_ONCE = BLOCKS * LANES, B = BLOCKS;
  constexpr int64_t MOST = Codes<WIDTH>::MOST;
  float scaled[N][MOST], offsets[N];
  for (int64_t first = 0; first < count; first += MOST)
    for (int64_t d = 0; d < WIDTH; d += AT_ONCE) {
      const int64_t some = count - first < MOST ? count - first : MOST;
      const float* pairs = values.pairs + (first * WIDTH / GROUP + d / GROUP) * 2;
      for (int n = 0; n < N; ++n) {
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t t = 0; t < some; ++t) {
          const float weight = weights[n * ROW + first + t];
          scaled[n][t] = weight * pairs[t * (WIDTH / GROUP) * 2];
          sum += weight * pairs[t * (WIDTH / GROUP) * 2 + 1];
        }
        offsets[n] = sum;
      }
      Lanes mixed[N][B];
      for (int n = 0; n < N; ++n)
        for (int64_t b = 0; b < B; ++b) mixed[n][b] = load(out + n * WIDTH + d + b * LANES) + offsets[n];
      for (int64_t t = 0; t < some; ++t) {
        if (next && d == 0) fetch(next + (first + t) * step, step);
#pragma GCC unroll 4
        for (int64_t b = 0; b < B; ++b) {
          const Lanes v = held(values.at(first + t, d + b * LANES));
          for (int n = 0; n < N; ++n) mixed[n][b] += scaled[n][t] * v;
        }
      }
      for (int n = 0; n < N; ++n)
        for (int64_t b = 0; b < B; ++b) store(out + n * WIDTH + d + b * LANES, mixed[n][b]);
    }
}

constexpr int MOST_GROUPS = 2;  // of a token below

// Call work(codes) with `count` tokens and return true; false if the column's width is neither 64 nor 128.
template <typename Work>
bool with_codes(const Column& c, const char* tokens, int64_t count, float* pairs, const Work& work) {
  const auto take = [&](auto codes) {
    codes.split(count);
    work(codes);
    return true;
  };
  if (c.width == 64) return take(Codes<64>{tokens, c.bytes, pairs});
  if (c.width == 128) return take(Codes<128>{tokens, c.bytes, pairs});
  return false;
}
