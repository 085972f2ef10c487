// The norm of Llama in bfloat16: out = w * bf16(x / sqrt(mean(x^2) + eps)) of each token, in one pass over its numbers.
//
// Each rounding is where the model has one; only the order of the sum of squares is another. Threads share the tokens.

#include <cmath>
#include <cstdint>
#include <cstring>

#include "native.h"

namespace {

constexpr int64_t PARALLEL = 1 << 15;  // least number of numbers for which several threads start
constexpr int SUMS = 4;                // independent registers

float sum_of_squares(const BFloat16* x, int64_t size) {
  Lanes parts[SUMS] = {};
  int64_t i = 0;
  for (; i + SUMS * LANES <= size; i += SUMS * LANES)
    for (int n = 0; n < SUMS; ++n) {
      const Lanes some = load(x + i + n * LANES);
      parts[n] += some * some;
    }
  float sum = total((parts[0] + parts[1]) + (parts[2] + parts[3]));
  for (; i < size; ++i) sum += widen(x[i]) * widen(x[i]);
  return sum;
}

// `narrow` of LANES numbers.
inline LaneBits bits_of(Lanes x) {
  const LaneBits bits = reinterpret_cast<LaneBits>(x), rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  const LaneBits is_nan = reinterpret_cast<LaneBits>(x != x);
  return (rounded & ~is_nan) | (is_nan & 0x7fc0);
}

}  // namespace

// x and out [tokens, size], w [size], all in bfloat16; eps points to one float32.
extern "C" void rms_norm(const BFloat16* x, const BFloat16* weight, const float* eps, int64_t tokens, int64_t size,
                         int64_t threads, BFloat16* out) {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && tokens * size >= PARALLEL)
  for (int64_t token = 0; token < tokens; ++token) {
    const BFloat16* in = x + token * size;
    BFloat16* to = out + token * size;
    const float scale = 1.0f / std::sqrt(sum_of_squares(in, size) / static_cast<float>(size) + *eps);
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) {
      const Lanes normed = reinterpret_cast<Lanes>(bits_of(load(in + i) * scale) << 16);
      const LaneHalves bits = __builtin_convertvector(bits_of(load(weight + i) * normed), LaneHalves);
      std::memcpy(to + i, &bits, sizeof bits);
    }
    for (; i < size; ++i) {
      BFloat16 normed;
      narrow(widen(in[i]) * scale, &normed);
      narrow(widen(weight[i]) * widen(normed), to + i);
    }
  }
}
