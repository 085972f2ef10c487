// A statistic of attention, summed over the rows of a tile: each logit is read from memory once.
//
// The rows of a head are cut into chunks of CHUNK. Each chunk has sums of its own, which are added in order, so that the
// result does not depend on the number of threads. Loops carry `omp simd` instead of -ffast-math, which would change
// floating point process-wide.

#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>

#include "native.h"

namespace {

constexpr int64_t CHUNK = 16;          // rows that one thread takes at a time
constexpr int64_t COLUMNS = 4096;      // columns that it adds up at a time
constexpr int64_t PARALLEL = 1 << 15;  // logits from which on threads are worth waking

enum Kind { ATTENTION, VALUE, KEY, JOINT };

// e = exp(s - max s), 0 where s is hidden (-inf); returns the sum, 0 for a row that sees nothing, NaN where s holds one.
float exponentials(const float* s, int64_t keys, float* e) {
  constexpr float hidden = -std::numeric_limits<float>::infinity();
  float most = hidden, sum = 0;
#pragma omp simd reduction(max : most)
  for (int64_t t = 0; t < keys; ++t) most = s[t] > most ? s[t] : most;
  if (most == hidden) most = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t t = 0; t < keys; ++t) {
    e[t] = exp_negative(s[t] - most);
    sum += e[t];
  }
  return sum;
}

// out += the statistic of one row, whose weights are A = e / total; norm = ||o||^2.
template <Kind KIND>
void add(const float* s, const float* e, float total, const float* norms, const float* dots, float norm, int64_t keys,
         float* out) {
  const float scale = 1 / total;
#pragma omp simd
  for (int64_t t = 0; t < keys; ++t) {
    const float a = e[t] * scale;
    if constexpr (KIND == ATTENTION) {
      out[t] += a;
    } else if constexpr (KIND == VALUE) {
      out[t] += norms[t] * a * a;
    } else {
      const float logit = a > 0 ? s[t] : 0.0f;  // no product of -inf
      const float less = norms[t] - 2 * dots[t], apart = less + norm;
      // ||(1 + s) v - s o||^2, in powers of s
      const float moved = KIND == KEY ? apart : norms[t] + logit * (norms[t] + less + logit * apart);
      const float change = KIND == KEY ? a * logit : a;
      out[t] += (moved < 0 ? 0.0f : moved) * change * change;
    }
  }
}

template <Kind KIND>
void sums(const float* logits, const uint8_t* counted, const float* value_norms, const float* dots,
          const float* output_norms, int64_t batch, int64_t heads, int64_t kv_heads, int64_t rows, int64_t keys,
          int threads, float* out) {
  const int64_t all = batch * heads, group = heads / kv_heads, chunks = (rows + CHUNK - 1) / CHUNK;
  const int64_t blocks = (keys + COLUMNS - 1) / COLUMNS;
  std::unique_ptr<float[]> several(chunks > 1 ? new float[all * chunks * keys] : nullptr);
  float* parts = chunks > 1 ? several.get() : out;
#pragma omp parallel num_threads(threads) if (threads > 1 && all * rows * keys >= PARALLEL)
  {
    std::unique_ptr<float[]> e(new float[keys]);
#pragma omp for schedule(dynamic)
    for (int64_t i = 0; i < all * chunks; ++i) {
      const int64_t head = i / chunks, first = i % chunks * CHUNK, last = std::min(first + CHUNK, rows);
      const float* norms = value_norms ? value_norms + head / group * keys : nullptr;
      float* sum = parts + i * keys;
      std::fill(sum, sum + keys, 0.0f);
      for (int64_t row = first; row < last; ++row) {
        if (!counted[head / heads * rows + row]) continue;
        const int64_t at = head * rows + row;
        const float* s = logits + at * keys;
        const float total = exponentials(s, keys, e.get());
        if (total == 0) continue;
        add<KIND>(s, e.get(), total, norms, dots ? dots + at * keys : nullptr, output_norms ? output_norms[at] : 0.0f,
                  keys, sum);
      }
    }
#pragma omp for
    for (int64_t i = 0; i < (chunks > 1 ? all * blocks : 0); ++i) {
      const int64_t head = i / blocks, start = i % blocks * COLUMNS, stop = std::min(start + COLUMNS, keys);
      float* sum = out + head * keys;
      std::fill(sum + start, sum + stop, 0.0f);
      for (int64_t chunk = 0; chunk < chunks; ++chunk) {
        const float* part = parts + (head * chunks + chunk) * keys;
#pragma omp simd
        for (int64_t t = start; t < stop; ++t) sum[t] += part[t];
      }
    }
  }
}

}  // namespace

// logits, dots [B, H, w, N]; counted [B, w]; value_norms [B, Hkv, N]; output_norms [B, H, w]; out [B, H, N]. All
// contiguous float32 but counted (bytes); null where the kind does not need them.
extern "C" void row_statistics(int kind, const float* logits, const uint8_t* counted, const float* value_norms,
                               const float* dots, const float* output_norms, int64_t batch, int64_t heads,
                               int64_t kv_heads, int64_t rows, int64_t keys, int threads, float* out) {
  const auto run = kind == ATTENTION ? sums<ATTENTION> : kind == VALUE ? sums<VALUE> : kind == KEY ? sums<KEY>
                                                                                                  : sums<JOINT>;
  run(logits, counted, value_norms, dots, output_norms, batch, heads, kv_heads, rows, keys, threads, out);
}
