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
constexpr float SHARP = 1.0f / 16;     // attention to all other keys, relative to the top one's, below which o is close

enum Kind { ATTENTION, VALUE, KEY, JOINT };

// Values of one KV head: centred [N, D], their centre [D], ||v||^2, ||v - centre||^2 and <v, v - centre> [N].
struct Values {
  const float *centred, *centre, *norms, *spread, *along;
  int64_t dim;
};

// What one row has beside its logits: e = exp(s - max s), 0 where s is hidden (-inf), of the key with the largest logit
// (`top`; -1: the row sees nothing) and of all others together (NaN where s holds one).
struct Row {
  const float *s, *e;
  int64_t keys, top;
  float others;
};

Row exponentials(const float* s, int64_t keys, float* e) {
  constexpr float hidden = -std::numeric_limits<float>::infinity();
  float most = hidden;
#pragma omp simd reduction(max : most)
  for (int64_t t = 0; t < keys; ++t) most = s[t] > most ? s[t] : most;
  const int64_t top = most == hidden ? -1 : std::find(s, s + keys, most) - s;
  if (most == hidden) most = 0;
  double others = 0;
  for (int64_t start = 0; start < keys; start += COLUMNS) {
    const int64_t stop = std::min(start + COLUMNS, keys);
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t t = start; t < stop; ++t) {
      e[t] = exp_negative(s[t] - most);
      sum += t == top ? 0.0f : e[t];  // beside 1 small numbers would be lost
    }
    others += sum;
  }
  return {s, e, keys, top, static_cast<float>(others)};
}

// difference = v_top - o. Where attention is sharp both are nearly the same: then it is the sum over the other keys,
// sum_q A_q (v_top - v_q).
void from_output(const Row& row, const Values& values, const float* output, float* difference) {
  const float* nearest = values.centred + row.top * values.dim;
  if (row.others > SHARP) {
#pragma omp simd
    for (int64_t d = 0; d < values.dim; ++d) difference[d] = nearest[d] - output[d];
    return;
  }
  std::fill(difference, difference + values.dim, 0.0f);
  for (int64_t t = 0; t < row.keys; ++t) {
    const float weight = row.e[t];
    if (weight == 0 || t == row.top) continue;
    const float* value = values.centred + t * values.dim;
#pragma omp simd
    for (int64_t d = 0; d < values.dim; ++d) difference[d] += weight * value[d];
  }
  const float scale = 1 / (1 + row.others);
#pragma omp simd
  for (int64_t d = 0; d < values.dim; ++d) difference[d] = (row.others * nearest[d] - difference[d]) * scale;
}

// out += the statistic of one row; output = o - centre [D], dots = <o - centre, v - centre> [N], difference is scratch.
template <Kind KIND>
void add(const Row& row, const Values& values, const float* output, const float* dots, float* difference, float* out) {
  const float scale = 1 / (1 + row.others);
  if constexpr (KIND == ATTENTION || KIND == VALUE) {
#pragma omp simd
    for (int64_t t = 0; t < row.keys; ++t) {
      const float a = row.e[t] * scale;
      out[t] += KIND == ATTENTION ? a : values.norms[t] * a * a;
    }
    return;
  }
  float size = 0, lean = 0;
#pragma omp simd reduction(+ : size, lean)
  for (int64_t d = 0; d < values.dim; ++d) {
    size += output[d] * output[d];
    lean += values.centre[d] * output[d];
  }
#pragma omp simd
  for (int64_t t = 0; t < row.keys; ++t) {
    const float a = t == row.top ? 0.0f : row.e[t] * scale, logit = a > 0 ? row.s[t] : 0.0f;  // no product of -inf
    const float apart = values.spread[t] - 2 * dots[t] + size;  // ||v - o||^2
    // ||v + s (v - o)||^2, in powers of s
    const float moved = KIND == KEY ? apart
                                    : values.norms[t] + logit * (2 * (values.along[t] - dots[t] - lean) + logit * apart);
    const float change = KIND == KEY ? a * logit : a;
    out[t] += (moved < 0 ? 0.0f : moved) * change * change;
  }
  from_output(row, values, output, difference);
  const float* nearest = values.centred + row.top * values.dim;
  const float logit = row.s[row.top], by_value = KIND == KEY ? 0.0f : scale, by_key = scale * logit;
  float moved = 0;
#pragma omp simd reduction(+ : moved)
  for (int64_t d = 0; d < values.dim; ++d) {
    const float change = by_value * (nearest[d] + values.centre[d]) + by_key * difference[d];
    moved += change * change;
  }
  out[row.top] += moved;
}

template <Kind KIND>
void sums(const float* logits, const uint8_t* counted, const float* norms, const float* spread, const float* along,
          const float* dots, const float* outputs, const float* centre, const float* centred, int64_t batch,
          int64_t heads, int64_t kv_heads, int64_t rows, int64_t keys, int64_t dim, int64_t batch_stride,
          int64_t head_stride, int64_t threads, float* out) {
  const int64_t all = batch * heads, group = heads / kv_heads, chunks = (rows + CHUNK - 1) / CHUNK;
  const int64_t blocks = (keys + COLUMNS - 1) / COLUMNS;
  const auto row_of = [](const float* base, int64_t index, int64_t size) { return base ? base + index * size : base; };
  std::unique_ptr<float[]> several(chunks > 1 ? new float[all * chunks * keys] : nullptr);
  float* parts = chunks > 1 ? several.get() : out;
#pragma omp parallel num_threads(threads) if (threads > 1 && all * rows * keys >= PARALLEL)
  {
    std::unique_ptr<float[]> e(new float[keys]), difference(new float[dim]);
#pragma omp for schedule(dynamic)
    for (int64_t i = 0; i < all * chunks; ++i) {
      const int64_t head = i / chunks, first = i % chunks * CHUNK, last = std::min(first + CHUNK, rows);
      const int64_t pair = head / group, b = pair / kv_heads, h = pair % kv_heads;
      const Values values{centred ? centred + b * batch_stride + h * head_stride : nullptr,
                          row_of(centre, pair, dim),
                          row_of(norms, pair, keys),
                          row_of(spread, pair, keys),
                          row_of(along, pair, keys),
                          dim};
      float* sum = parts + i * keys;
      std::fill(sum, sum + keys, 0.0f);
      for (int64_t at = head * rows + first; at < head * rows + last; ++at) {
        if (!counted[b * rows + at - head * rows]) continue;
        const Row row = exponentials(logits + at * keys, keys, e.get());
        if (row.top >= 0) add<KIND>(row, values, row_of(outputs, at, dim), row_of(dots, at, keys), difference.get(), sum);
        else if (row.others != 0) std::fill(sum, sum + keys, row.others);  // NaN, where every logit is
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

// logits, dots [B, H, w, N]; counted [B, w]; norms, spread, along [B, Hkv, N]; outputs [B, H, w, D]; centre [B, Hkv, D];
// centred [B, Hkv, N, D], of which each head's matrix is contiguous; out [B, H, N]. The others are contiguous; all are
// float32 but counted (bytes), and null where the kind does not need them.
extern "C" void row_statistics(int64_t kind, const float* logits, const uint8_t* counted, const float* norms,
                               const float* spread, const float* along, const float* dots, const float* outputs,
                               const float* centre, const float* centred, int64_t batch, int64_t heads,
                               int64_t kv_heads, int64_t rows, int64_t keys, int64_t dim, int64_t batch_stride,
                               int64_t head_stride, int64_t threads, float* out) {
  const auto run = kind == ATTENTION ? sums<ATTENTION> : kind == VALUE ? sums<VALUE> : kind == KEY ? sums<KEY>
                                                                                                  : sums<JOINT>;
  run(logits, counted, norms, spread, along, dots, outputs, centre, centred, batch, heads, kv_heads, rows, keys, dim,
      batch_stride, head_stride, threads, out);
}
