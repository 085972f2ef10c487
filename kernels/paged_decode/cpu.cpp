// One new token per sequence against rows of keys and values in pages: a memory-bound pass over what is held.
//
// A row is cut into chunks of CHUNK slots. Each chunk gives its own maximum, sum and mix, and the chunks of a row are
// merged in order, so that the result depends neither on the number of threads nor on where pages lie. The G query heads
// of a row read each key and value once. While a page is read another is fetched, as processors foresee only what
// follows in memory.
// Plain C at the border, so that it compiles in a second or two, without the headers of PyTorch.

#include <algorithm>
#include <cstdint>
#include <limits>
#include <type_traits>
#include <vector>

#include "native.h"

namespace {

constexpr int64_t CHUNK = 256;
constexpr int64_t AHEAD = 2;  // pages

// scores[n][t] = <q_n, k_t>, of N queries; meanwhile the page `next` is fetched, where there is one.
template <int N, typename T>
void dot(const float* q, const T* keys, int64_t count, int64_t dim, float* scores, const T* next) {
  for (int64_t t = 0; t < count; ++t) {
    const T* key = keys + t * dim;
    if (next) fetch(next + t * dim, dim * sizeof(T));
    Lanes sums[N] = {};
    int64_t d = 0;
    for (; d + LANES <= dim; d += LANES) {
      const Lanes k = load(key + d);
      for (int n = 0; n < N; ++n) sums[n] += load(q + n * dim + d) * k;
    }
    for (int n = 0; n < N; ++n) {
      float sum = total(sums[n]);
      for (int64_t e = d; e < dim; ++e) sum += q[n * dim + e] * widen(key[e]);
      scores[n * CHUNK + t] = sum;
    }
  }
}

// Call work(std::integral_constant<int, N>, g) for queries [g, g + N) until all of the group have had their turn.
template <typename Work>
void by_four(int64_t group, const Work& work) {
  int64_t g = 0;
  for (; g + 4 <= group; g += 4) work(std::integral_constant<int, 4>(), g);
  if (group - g == 3) work(std::integral_constant<int, 3>(), g);
  if (group - g == 2) work(std::integral_constant<int, 2>(), g);
  if (group - g == 1) work(std::integral_constant<int, 1>(), g);
}

struct Chunk {
  int64_t row, offset, count;  // slots [offset, offset + count) of the row
};

void find_parts(const Chunk& c, const int32_t* pages, int64_t page, std::vector<Part>& parts) {
  parts.clear();
  for (int64_t slot = c.offset, end = c.offset + c.count; slot < end; slot += parts.back().count)
    parts.push_back({pages[slot / page] * page + slot % page, std::min(page - slot % page, end - slot), slot - c.offset});
}

template <typename T>
void attend(const float* q, const T* keys, const T* values, const int32_t* table, const int32_t* lengths, int64_t rows,
            int64_t group, int64_t dim, int64_t width, int64_t stride, int64_t slots, int64_t page, int64_t threads,
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
    std::vector<float> scores(group * CHUNK);
    std::vector<Part> parts;
#pragma omp for schedule(dynamic)
    for (int64_t i = 0; i < pieces; ++i) {
      const Chunk c = chunks[i];
      float *mixes = partials.data() + i * partial, *maxima = mixes + group * width, *sums = maxima + group;
      find_parts(c, table + c.row * stride, page, parts);
      const int64_t number = static_cast<int64_t>(parts.size());
      const auto coming = [&](int64_t visit) -> const T* {  // all pages of keys are visited, then those of values
        if (visit < number) return keys + parts[visit].start * dim;
        return visit < 2 * number ? values + parts[visit - number].start * width : nullptr;
      };
      for (int64_t j = 0; j < number; ++j) {
        const Part& p = parts[j];
        const T* next = coming(j + AHEAD);
        by_four(group, [&](auto some, int64_t g) {
          dot<some>(q + (c.row * group + g) * dim, keys + p.start * dim, p.count, dim,
                    scores.data() + g * CHUNK + p.offset, g ? nullptr : next);
        });
      }
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
      for (int64_t j = 0; j < number; ++j) {
        const Part& p = parts[j];
        const T* next = coming(number + j + AHEAD);
        by_four(group, [&](auto some, int64_t g) {
          mix<some, CHUNK, 1>(scores.data() + g * CHUNK + p.offset, values + p.start * width, p.count, width,
                              mixes + g * width, g ? nullptr : next);
        });
      }
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
extern "C" void paged_decode(int64_t type, const float* q, const void* keys, const void* values, const int32_t* table,
                             const int32_t* lengths, int64_t rows, int64_t group, int64_t dim, int64_t width,
                             int64_t stride, int64_t slots, int64_t page, int64_t threads, float* out, float* weights) {
  by_type(type, [&](auto kind) {
    using T = decltype(kind);
    attend(q, static_cast<const T*>(keys), static_cast<const T*>(values), table, lengths, rows, group, dim, width,
           stride, slots, page, threads, out, weights);
  });
}
