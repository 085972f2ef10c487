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

#include "codes.h"
#include "softmax.h"

namespace {

constexpr int64_t CHUNK = 256;
constexpr int64_t AHEAD = 2;  // pages

// scores[n][t] = <q_n, k_t>, of N queries; meanwhile `step` bytes a token are fetched from `next` on, where there is
// something.
template <int N>
void dot(const float* q, const float* keys, int64_t count, int64_t dim, float* scores, const char* next, int64_t step) {
  int64_t t = 0;
  for (; t + 4 <= count && dim % LANES == 0; t += 4) {
    if (next) fetch(next + t * step, 4 * step);
    Lanes sums[N][4] = {};
    for (int64_t d = 0; d < dim; d += LANES)
      for (int i = 0; i < 4; ++i) {
        const Lanes k = load(keys + (t + i) * dim + d);
        for (int n = 0; n < N; ++n) sums[n][i] += load(q + n * dim + d) * k;
      }
    for (int n = 0; n < N; ++n) {
      const Four four = totals(sums[n]);
      std::memcpy(scores + n * CHUNK + t, &four, sizeof four);
    }
  }
  for (; t < count; ++t) {
    const float* key = keys + t * dim;
    if (next) fetch(next + t * step, step);
    Lanes sums[N] = {};
    int64_t d = 0;
    for (; d + LANES <= dim; d += LANES) {
      const Lanes k = load(key + d);
      for (int n = 0; n < N; ++n) sums[n] += load(q + n * dim + d) * k;
    }
    for (int n = 0; n < N; ++n) {
      float sum = total(sums[n]);
      for (int64_t e = d; e < dim; ++e) sum += q[n * dim + e] * key[e];
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

void attend(const Pages& pages, const float* q, int64_t group, int64_t slots, int64_t threads, const float* cap,
            const float* sinks, float* out, float* weights) {
  const int64_t rows = pages.rows, dim = pages.keys.width, width = pages.values.width;
  const int64_t partial = group * (width + 2);  // per chunk: the mixes, then maxima, then sums
  std::vector<Chunk> chunks;
  std::vector<int64_t> first(rows + 1, 0);
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t t = 0; t < pages.lengths[row]; t += CHUNK)
      chunks.push_back({row, t, std::min<int64_t>(CHUNK, pages.lengths[row] - t)});
    first[row + 1] = static_cast<int64_t>(chunks.size());
  }
  const int64_t pieces = static_cast<int64_t>(chunks.size());
  std::vector<float> partials(pieces * partial);
#pragma omp parallel num_threads(threads) if (threads > 1 && pieces > 1)
  {
    std::vector<float> scores(group * CHUNK), room(pages.page * std::max(dim, width));
    std::vector<float> pairs((pages.page + 3) * MOST_GROUPS * 2);
    std::vector<Part> parts;
#pragma omp for schedule(dynamic)
    for (int64_t i = 0; i < pieces; ++i) {
      const Chunk c = chunks[i];
      float *mixes = partials.data() + i * partial, *maxima = mixes + group * width, *sums = maxima + group;
      parts.clear();
      for (int64_t slot = c.offset, end = c.offset + c.count; slot < end; slot += parts.back().count)
        parts.push_back(pages.part(c.row, slot, end, c.offset));
      const int64_t number = static_cast<int64_t>(parts.size());
      // All pages of keys are visited, then those of values: work(N, g, part, tokens, next, step) of N queries from g on.
      const auto visit = [&](int64_t turn, const auto& work) {
        const auto column = [&](int64_t n) -> const Column& { return n < number ? pages.keys : pages.values; };
        const auto part = [&](int64_t n) -> const Part& { return parts[n % number]; };
        const Column& here = column(turn);
        const Part& p = part(turn);
        const int64_t ahead = turn + AHEAD, step = column(ahead).bytes;
        const char* next = ahead < 2 * number ? column(ahead).data + part(ahead).start * step : nullptr;
        const auto all = [&](const auto& tokens) {
          by_four(group, [&](auto some, int64_t g) { work(some, g, p, tokens, g ? nullptr : next, step); });
        };
        const char* tokens = here.data + p.start * here.bytes;
        if (here.coded && with_codes(here, tokens, p.count, pairs.data(), all)) return;
        all(numbers(here, p, room.data()));
      };
      for (int64_t j = 0; j < number; ++j)
        visit(j, [&](auto some, int64_t g, const Part& p, const auto& keys, const char* next, int64_t step) {
          const float* queries = q + (c.row * group + g) * dim;
          float* of_part = scores.data() + g * CHUNK + p.offset;
          if constexpr (std::is_pointer_v<std::decay_t<decltype(keys)>>)
            dot<some>(queries, keys, p.count, dim, of_part, next, step);
          else dot<some, CHUNK>(queries, keys, p.count, of_part, next, step);
        });
      for (int64_t g = 0; g < group; ++g) {
        float* s = scores.data() + g * CHUNK;
        if (cap) bend(s, c.count, *cap);
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
      for (int64_t j = number; j < 2 * number; ++j)
        visit(j, [&](auto some, int64_t g, const Part& p, const auto& values, const char* next, int64_t step) {
          const float* s = scores.data() + g * CHUNK + p.offset;
          float* of_part = mixes + g * width;
          if constexpr (std::is_pointer_v<std::decay_t<decltype(values)>>)
            mix<some, CHUNK, 1>(s, values, p.count, width, of_part, next, step);
          else mix<some, CHUNK>(s, values, p.count, of_part, next, step);
        });
      for (int64_t g = 0; g < group && weights; ++g)
        std::copy_n(scores.data() + g * CHUNK, c.count, weights + (c.row * group + g) * slots + c.offset);
    }
  }
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t g = 0; g < group; ++g) {
      const float none = -std::numeric_limits<float>::max(), sink = sinks ? sinks[row * group + g] : none;
      float most = sink;
      for (int64_t i = first[row]; i < first[row + 1]; ++i)
        most = std::max(most, partials[i * partial + group * width + g]);
      float sum = sinks ? exp_negative(sink - most) : 0;
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
      std::fill(w + pages.lengths[row], w + slots, 0.0f);
    }
}

}  // namespace

// q [pages.rows, G, D] float32, scaled already; cap [1] and sinks [rows, G], or null; out [rows, G, Dv] float32; weights
// [rows, G, slots] float32, or null where nobody wants them. All contiguous.
extern "C" void paged_decode(const Pages* pages, const float* q, int64_t group, int64_t slots, int64_t threads,
                             const float* cap, const float* sinks, float* out, float* weights) {
  attend(*pages, q, group, slots, threads, cap, sinks, out, weights);
}
