// One new token per sequence against rows of keys and values in pages: a memory-bound pass over what is held.
//
// A row is cut into chunks of CHUNK slots, and those into runs of pages that follow each other in the pool, so that such
// pages are read like one buffer. Each chunk gives its own maximum, sum and mix, and the chunks of a row are merged in
// order, so that the result depends neither on the number of threads nor, where a page is a multiple of four tokens, on
// where pages lie. The G query heads of a row read each key and value once. Loops carry `omp simd` instead of -ffast-math, which would change floating point process-wide.
// Plain C at the border, so that it compiles in a second or two, without the headers of PyTorch.

#include <algorithm>
#include <cstdint>
#include <limits>
#include <type_traits>
#include <vector>

#include "native.h"

namespace {

constexpr int64_t CHUNK = 256;

// scores[g][t] = <q_g, k_t>; DIM 0: the size is known at run time only.
template <int DIM, typename T>
void dot(const float* q, const T* keys, int64_t group, int64_t count, int64_t size, float* scores, float* wide) {
  const int64_t dim = DIM ? DIM : size;
  for (int64_t t = 0; t < count; ++t) {
    const T* key = keys + t * dim;
    const float* k;
    if constexpr (std::is_same_v<T, float>) {
      k = key;
    } else {
#pragma omp simd
      for (int64_t d = 0; d < dim; ++d) wide[d] = widen(key[d]);
      k = wide;
    }
    for (int64_t g = 0; g < group; ++g) {
      const float* query = q + g * dim;
      float sum = 0;
#pragma omp simd reduction(+ : sum)
      for (int64_t d = 0; d < dim; ++d) sum += query[d] * k[d];
      scores[g * CHUNK + t] = sum;
    }
  }
}

// out[g] += sum_t weights[g][t] v_t, four tokens at a time.
template <int DIM, typename T>
void mix(const float* weights, const T* values, int64_t group, int64_t count, int64_t size, float* out) {
  const int64_t dim = DIM ? DIM : size;
  int64_t t = 0;
  for (; t + 4 <= count; t += 4) {
    const T *a = values + t * dim, *b = a + dim, *c = b + dim, *e = c + dim;
    for (int64_t g = 0; g < group; ++g) {
      const float* w = weights + g * CHUNK + t;
      const float w0 = w[0], w1 = w[1], w2 = w[2], w3 = w[3];
      float* o = out + g * dim;
#pragma omp simd
      for (int64_t d = 0; d < dim; ++d)
        o[d] += w0 * widen(a[d]) + w1 * widen(b[d]) + (w2 * widen(c[d]) + w3 * widen(e[d]));
    }
  }
  for (; t < count; ++t)
    for (int64_t g = 0; g < group; ++g) {
      const float w = weights[g * CHUNK + t];
      float* o = out + g * dim;
#pragma omp simd
      for (int64_t d = 0; d < dim; ++d) o[d] += w * widen(values[t * dim + d]);
    }
}

template <typename T>
void dot_any(const float* q, const T* keys, int64_t group, int64_t count, int64_t dim, float* scores, float* wide) {
  if (dim == 64) return dot<64>(q, keys, group, count, dim, scores, wide);
  if (dim == 128) return dot<128>(q, keys, group, count, dim, scores, wide);
  dot<0>(q, keys, group, count, dim, scores, wide);
}

template <typename T>
void mix_any(const float* weights, const T* values, int64_t group, int64_t count, int64_t dim, float* out) {
  if (dim == 64) return mix<64>(weights, values, group, count, dim, out);
  if (dim == 128) return mix<128>(weights, values, group, count, dim, out);
  mix<0>(weights, values, group, count, dim, out);
}

struct Chunk {
  int64_t row, offset, count;  // slots [offset, offset + count) of the row
};

struct Run {
  int64_t start, count, offset;  // tokens [start, start + count) of the pool are slots from offset on of the chunk
};

// The runs of a chunk of a row with these pages; adjacent slots are in one run wherever the pool has them side by side.
void find_runs(const Chunk& c, const int32_t* pages, int64_t page, std::vector<Run>& runs) {
  runs.clear();
  for (int64_t slot = c.offset, end = c.offset + c.count; slot < end;) {
    const int64_t start = pages[slot / page] * page + slot % page;
    const int64_t count = std::min(page - slot % page, end - slot);
    if (!runs.empty() && runs.back().start + runs.back().count == start)
      runs.back().count += count;
    else
      runs.push_back({start, count, slot - c.offset});
    slot += count;
  }
}

template <typename T>
void attend(const float* q, const T* keys, const T* values, const int32_t* table, const int32_t* lengths, int64_t rows,
            int64_t group, int64_t dim, int64_t width, int64_t stride, int64_t slots, int64_t page, int threads,
            float* out, float* weights) {
  const int64_t partial = group * (width + 2);  // per chunk: the mixes, then maxima, then sums
  std::vector<Chunk> chunks;
  std::vector<int64_t> first(rows + 1, 0);
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t t = 0; t < lengths[row]; t += CHUNK)
      chunks.push_back({row, t, std::min<int64_t>(CHUNK, lengths[row] - t)});
    first[row + 1] = static_cast<int64_t>(chunks.size());
  }
  const int64_t pieces = static_cast<int64_t>(chunks.size());
  std::vector<float> partials(pieces * partial);
#pragma omp parallel num_threads(threads) if (threads > 1 && pieces > 1)
  {
    std::vector<float> scores(group * CHUNK), wide(dim);
    std::vector<Run> runs;
#pragma omp for schedule(dynamic)
    for (int64_t i = 0; i < pieces; ++i) {
      const Chunk c = chunks[i];
      float *mixes = partials.data() + i * partial, *maxima = mixes + group * width, *sums = maxima + group;
      find_runs(c, table + c.row * stride, page, runs);
      for (const Run& r : runs)
        dot_any(q + c.row * group * dim, keys + r.start * dim, group, r.count, dim, scores.data() + r.offset,
                wide.data());
      for (int64_t g = 0; g < group; ++g) {
        float* s = scores.data() + g * CHUNK;
        float most = s[0], sum = 0;
#pragma omp simd reduction(max : most)
        for (int64_t t = 0; t < c.count; ++t) most = s[t] > most ? s[t] : most;
#pragma omp simd reduction(+ : sum)
        for (int64_t t = 0; t < c.count; ++t) {
          s[t] = exp_negative(s[t] - most);
          sum += s[t];
        }
        maxima[g] = most;
        sums[g] = sum;
      }
      for (const Run& r : runs)
        mix_any(scores.data() + r.offset, values + r.start * width, group, r.count, width, mixes);
      for (int64_t g = 0; g < group && weights; ++g)
        std::copy_n(scores.data() + g * CHUNK, c.count, weights + (c.row * group + g) * slots + c.offset);
    }
  }
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t g = 0; g < group; ++g) {
      float most = -std::numeric_limits<float>::max(), sum = 0;
      for (int64_t i = first[row]; i < first[row + 1]; ++i)
        most = std::max(most, partials[i * partial + group * width + g]);
      float* o = out + (row * group + g) * width;
      std::fill(o, o + width, 0.0f);
      for (int64_t i = first[row]; i < first[row + 1]; ++i) {
        const float* mixes = partials.data() + i * partial;
        const float weight = exp_negative(mixes[group * width + g] - most);
        sum += weight * mixes[group * width + group + g];
        for (int64_t d = 0; d < width; ++d) o[d] += weight * mixes[g * width + d];
      }
      for (int64_t d = 0; d < width && sum > 0; ++d) o[d] /= sum;  // a row that holds nothing gives 0
      if (!weights) continue;
      float* w = weights + (row * group + g) * slots;
      for (int64_t i = first[row]; i < first[row + 1]; ++i) {
        const float share = exp_negative(partials[i * partial + group * width + g] - most) / sum;
        for (int64_t t = 0; t < chunks[i].count; ++t) w[chunks[i].offset + t] *= share;
      }
      std::fill(w + lengths[row], w + slots, 0.0f);
    }
}

}  // namespace

// q [R, G, D] float32, scaled already; keys [P, page, D], values [P, page, Dv] of a type (0 float32, 1 bfloat16,
// 2 float16); table [R, slots / page], its rows `stride` apart; lengths [R]; out [R, G, Dv] float32; weights
// [R, G, slots] float32, or null where nobody wants them. All but the table contiguous.
extern "C" void paged_decode(int type, const float* q, const void* keys, const void* values, const int32_t* table,
                             const int32_t* lengths, int64_t rows, int64_t group, int64_t dim, int64_t width,
                             int64_t stride, int64_t slots, int64_t page, int threads, float* out, float* weights) {
  const auto run = [&](auto kind) {
    using T = decltype(kind);
    attend(q, static_cast<const T*>(keys), static_cast<const T*>(values), table, lengths, rows, group, dim, width,
           stride, slots, page, threads, out, weights);
  };
  if (type == 0) run(float());
  if (type == 1) run(BFloat16());
  if (type == 2) run(Half());
}
