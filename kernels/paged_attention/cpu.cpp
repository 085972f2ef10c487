// Attention from new tokens to rows of keys and values in pages, which contain the new tokens.
//
// One query of a sequence (`decode`) is bound by memory. Rows are cut into chunks of CHUNK slots, which threads share.
// Each chunk gives a maximum, a sum and a mix of values, and the chunks of a row are merged in order. The G query heads
// of a row read each key and value once. While one page is read another is prefetched, because processors only predict
// consecutive addresses.
//
// Several queries (`attend`) are bound by products. A block of queries reads the pages of its row with a running
// softmax. A register holds several queries where logits are computed, so that it needs no sum of its own numbers, and
// several numbers of a value where values are mixed.
//
// The order of sums depends on slots alone, neither on the number of threads nor on the places of pages.
// Plain C at the border, so that it compiles in a second or two, without the headers of PyTorch.

#include <algorithm>
#include <cstdint>
#include <limits>
#include <type_traits>
#include <vector>

#include "codes.h"
#include "logits.h"

namespace {

constexpr int64_t CHUNK = 256;  // slots of a row that a thread takes at a time, for one query
constexpr int64_t AHEAD = 2;    // distance in pages from the page that is read to the one that is prefetched
constexpr int64_t TILE = 64;    // slots between two updates of the maxima, for a block of queries
// LEAST, not NONE, starts a maximum: NONE - NONE would be NaN.
constexpr float NONE = -std::numeric_limits<float>::infinity(), LEAST = -std::numeric_limits<float>::max();

struct Call {
  const Pages& pages;
  const bool* gate;   // null means that gates do not matter
  const int64_t* at;  // [rows / heads, count], token indices of the queries; null means that they see all tokens
  int64_t heads, group, count, window, recent;  // heads: rows of a sequence; window, recent: 0 means none
  const float *cap, *sinks;                     // of logits; [rows, group]; null means none
};

// Token indices that a query sees: up to `at`, above `open`, and above `closed` where the token's gate is closed.
struct Reach {
  int32_t at, open, closed;

  // Of query i of a row, [0, G count).
  Reach(const Call& call, int64_t row, int64_t i) {
    const int64_t last = std::numeric_limits<int32_t>::max();
    const int64_t token_index = call.at ? call.at[row / call.heads * call.count + i % call.count] : last;
    const int64_t all = std::numeric_limits<int32_t>::min();
    const int64_t low = call.window ? std::max(token_index - call.window, all) : all;
    at = static_cast<int32_t>(token_index), open = static_cast<int32_t>(low);
    closed = static_cast<int32_t>(std::max(low, token_index - call.recent));
  }
};

// ---- one query of a sequence

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

// Call work(std::integral_constant<int, N>, g) for queries [g, g + N), until all queries of the group are done.
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

// Call work(part) with the pages of a chunk, one after the other.
template <typename Work>
void by_page(const Pages& pages, const Chunk& c, const Work& work) {
  for (int64_t slot = c.offset, end = c.offset + c.count; slot < end;) {
    const Part p = pages.part(c.row, slot, end, c.offset);
    slot += p.count;
    work(p);
  }
}

// Find the parts of a chunk of which the query sees something, and which slots it sees; return whether it sees all.
bool look(const Call& call, const Chunk& c, std::vector<Part>& parts, int32_t* seen) {
  const Reach reach(call, c.row, 0);
  int32_t number = 0;
  parts.clear();
  by_page(call.pages, c, [&](const Part& p) {
    if (!call.at) return parts.push_back(p);
    const int32_t *token_indices = call.pages.token_indices + p.start, at = reach.at, open = reach.open;
    int32_t *of_part = seen + p.offset, some = 0;
#pragma omp simd
    for (int64_t t = 0; t < p.count; ++t) of_part[t] = (token_indices[t] <= at) & (token_indices[t] > open);
    for (int64_t t = 0; t < p.count && call.gate; ++t)
      of_part[t] &= call.gate[p.start + t] | (token_indices[t] > reach.closed);
#pragma omp simd reduction(+ : some)
    for (int64_t t = 0; t < p.count; ++t) some += of_part[t];
    if (some) parts.push_back(p);
    number += some;
  });
  return !call.at || number == c.count;
}

// Memory of a thread for a chunk.
struct Room {
  std::vector<float> scores, read, pairs;
  std::vector<int32_t> seen;
  std::vector<Part> parts;
  Room(const Pages& pages, int64_t group)
      : scores(group * CHUNK),
        read(pages.page * std::max(pages.keys.width, pages.values.width)),
        pairs((pages.page + 3) * MOST_GROUPS * 2),
        seen(CHUNK) {}
};

// Write the results of a chunk for each query: mixes [G, Dv], maxima [G], sums [G], and weights unless they are null.
// All but the maxima are relative to these.
void split(const Call& call, const float* q, const Chunk& c, Room& room, float* mixes, float* weights, int64_t slots) {
  const Pages& pages = call.pages;
  const int64_t group = call.group, dim = pages.keys.width, width = pages.values.width;
  float *maxima = mixes + group * width, *sums = maxima + group, *scores = room.scores.data();
  const std::vector<Part>& parts = room.parts;
  const bool all = look(call, c, room.parts, room.seen.data());
  const int64_t number = static_cast<int64_t>(parts.size());
  // Turn n < number is part n of the keys, turn number + n part n of the values, so that the last keys prefetch the
  // first values: work(N, g, part, tokens, next, step) of N queries from g on.
  const auto visit = [&](int64_t turn, const auto& work) {
    const auto column = [&](int64_t n) -> const Column& { return n < number ? pages.keys : pages.values; };
    const auto part = [&](int64_t n) -> const Part& { return parts[n % number]; };
    const Column& here = column(turn);
    const Part& p = part(turn);
    const int64_t ahead = turn + AHEAD, step = column(ahead).bytes;
    const char* next = ahead < 2 * number ? column(ahead).data + part(ahead).start * step : nullptr;
    const auto each = [&](const auto& tokens) {
      by_four(group, [&](auto some, int64_t g) { work(some, g, p, tokens, g ? nullptr : next, step); });
    };
    const char* tokens = here.data + p.start * here.bytes;
    if (here.coded && with_codes(here, tokens, p.count, room.pairs.data(), each)) return;
    each(numbers(here, p, room.read.data()));
  };
  for (int64_t j = 0; j < number; ++j)
    visit(j, [&](auto some, int64_t g, const Part& p, const auto& keys, const char* next, int64_t step) {
      const float* queries = q + (c.row * group + g) * dim;
      float* of_part = scores + g * CHUNK + p.offset;
      if constexpr (std::is_pointer_v<std::decay_t<decltype(keys)>>)
        dot<some>(queries, keys, p.count, dim, of_part, next, step);
      else dot<some, CHUNK>(queries, keys, p.count, of_part, next, step);
    });
  for (int64_t g = 0; g < group; ++g) {
    float *s = scores + g * CHUNK, most = LEAST, sum = 0;
    const int32_t* seen = room.seen.data();
    if (call.cap) bend(s, c.count, *call.cap);
#pragma omp simd
    for (int64_t t = 0; t < (all ? 0 : c.count); ++t) s[t] = seen[t] ? s[t] : NONE;
#pragma omp simd reduction(max : most)
    for (int64_t t = 0; t < c.count; ++t) most = s[t] > most ? s[t] : most;
#pragma omp simd reduction(+ : sum)
    for (int64_t t = 0; t < c.count; ++t) {
      s[t] = exp_negative(s[t] - most);
      sum += s[t];
    }
    maxima[g] = most;
    sums[g] = sum;
    if (weights) std::copy_n(s, c.count, weights + (c.row * group + g) * slots + c.offset);
  }
  for (int64_t j = number; j < 2 * number; ++j)
    visit(j, [&](auto some, int64_t g, const Part& p, const auto& values, const char* next, int64_t step) {
      const float* s = scores + g * CHUNK + p.offset;
      float* of_part = mixes + g * width;
      if constexpr (std::is_pointer_v<std::decay_t<decltype(values)>>)
        mix<some, CHUNK, 1>(s, values, p.count, width, of_part, next, step);
      else mix<some, CHUNK>(s, values, p.count, of_part, next, step);
    });
}

void decode(const Call& call, const float* q, int64_t slots, int64_t threads, float* out, float* weights) {
  const Pages& pages = call.pages;
  const int64_t group = call.group, width = pages.values.width, partial = group * (width + 2);
  std::vector<Chunk> chunks;
  std::vector<int64_t> first(pages.rows + 1, 0);
  for (int64_t row = 0; row < pages.rows; ++row) {
    for (int64_t t = 0; t < pages.lengths[row]; t += CHUNK)
      chunks.push_back({row, t, std::min<int64_t>(CHUNK, pages.lengths[row] - t)});
    first[row + 1] = static_cast<int64_t>(chunks.size());
  }
  const int64_t pieces = static_cast<int64_t>(chunks.size());
  std::vector<float> partials(pieces * partial);
#pragma omp parallel num_threads(threads) if (threads > 1 && pieces > 1)
  {
    Room room(pages, group);
#pragma omp for schedule(dynamic)
    for (int64_t i = 0; i < pieces; ++i) {
      if (call.at && i + 1 < pieces)
        by_page(pages, chunks[i + 1], [&](const Part& p) { fetch(pages.token_indices + p.start, 4 * p.count); });
      split(call, q, chunks[i], room, partials.data() + i * partial, weights, slots);
    }
  }
  for (int64_t row = 0; row < pages.rows; ++row)
    for (int64_t g = 0; g < group; ++g) {
      const float sink = call.sinks ? call.sinks[row * group + g] : LEAST;
      const auto maximum = [&](int64_t i) { return partials[i * partial + group * width + g]; };
      float most = sink;
      for (int64_t i = first[row]; i < first[row + 1]; ++i) most = std::max(most, maximum(i));
      float sum = call.sinks ? exp_negative(sink - most) : 0;
      float* o = out + (row * group + g) * width;
      std::fill(o, o + width, 0.0f);
      for (int64_t i = first[row]; i < first[row + 1]; ++i) {
        const float* mixes = partials.data() + i * partial;
        const float weight = exp_negative(maximum(i) - most);
        sum += weight * mixes[group * width + group + g];
        for (int64_t d = 0; d < width; ++d) o[d] += weight * mixes[g * width + d];
      }
      const float scale = sum == 0 ? 0 : 1 / sum;  // a query that sees nothing gives 0
      for (int64_t d = 0; d < width; ++d) o[d] *= scale;
      if (!weights) continue;
      float* w = weights + (row * group + g) * slots;
      for (int64_t i = first[row]; i < first[row + 1]; ++i) {
        const float share = exp_negative(maximum(i) - most) * scale;
        for (int64_t t = 0; t < chunks[i].count; ++t) w[chunks[i].offset + t] *= share;
      }
      std::fill(w + pages.lengths[row], w + slots, 0.0f);
    }
}

// ---- several queries of a sequence

// Indices of visible tokens and running softmax of a block of queries; each array has a number for each query, `lanes` in use.
struct Block {
  int64_t lanes;
  int32_t at[QUERIES], open[QUERIES], closed[QUERIES];  // see Reach
  float most[QUERIES], sum[QUERIES];
  int32_t last = -1, first = std::numeric_limits<int32_t>::max();  // the largest `at`, the smallest `open`
  int32_t all_to = first, all_from = -1;  // the smallest `at`, the largest `open`: all queries see the tokens between them
};

// The parts of slots [slot, end) of a row that some query may see.
void find_parts(const Pages& pages, const Block& block, int64_t row, int64_t slot, int64_t end,
                std::vector<Part>& parts) {
  parts.clear();
  for (int64_t begin = slot; slot < end;) {
    const Part p = pages.part(row, slot, end, begin);
    const auto [low, high] = std::minmax_element(pages.token_indices + p.start, pages.token_indices + p.start + p.count);
    slot += p.count;
    if (*low > block.last || *high <= block.first) continue;
    if (!parts.empty() && parts.back().start + parts.back().count == p.start &&
        parts.back().offset + parts.back().count == p.offset)
      parts.back().count += p.count;  // pages that lie side by side are worked on at once
    else parts.push_back(p);
  }
}

// Logits of a part become -infinity where a query does not see the token.
void hide(const Call& call, const Block& block, const Part& p, float* s) {
  for (int64_t t = 0; t < p.count; ++t) {
    const int32_t token_index = call.pages.token_indices[p.start + t];
    const bool closed = call.gate && !call.gate[p.start + t];
    if (!closed && token_index <= block.all_to && token_index > block.all_from) continue;
    const int32_t* low = closed ? block.closed : block.open;
    float* of_token = s + t * QUERIES;
#pragma omp simd
    for (int64_t q = 0; q < block.lanes; ++q)
      of_token[q] = (token_index <= block.at[q]) & (token_index > low[q]) ? of_token[q] : NONE;
  }
}

// Replace the logits of a tile by exponentials, and update the maxima, the sums and the scale of `out`.
void weigh(const std::vector<Part>& parts, int64_t width, Block& block, float* s, float* out) {
  float most[QUERIES];
  std::copy_n(block.most, block.lanes, most);
  const auto by_token = [&](const auto& work) {
    for (const Part& p : parts)
      for (int64_t t = p.offset; t < p.offset + p.count; ++t) work(s + t * QUERIES);
  };
  by_token([&](const float* x) {
#pragma omp simd
    for (int64_t q = 0; q < block.lanes; ++q) most[q] = x[q] > most[q] ? x[q] : most[q];
  });
  for (int64_t q = 0; q < block.lanes; ++q)
    if (most[q] != block.most[q]) {
      const float shrink = exp_negative(block.most[q] - most[q]);
      block.sum[q] *= shrink;
      for (int64_t d = 0; d < width; ++d) out[q * width + d] *= shrink;
      block.most[q] = most[q];
    }
  by_token([&](float* x) {
#pragma omp simd
    for (int64_t q = 0; q < block.lanes; ++q) {
      x[q] = exp_negative(x[q] - most[q]);
      block.sum[q] += x[q];
    }
  });
}

// Memory of a thread for a block.
struct BlockRoom {
  std::vector<float> q, s, read, out;
  std::vector<Part> parts;
  explicit BlockRoom(const Pages& pages)
      : q(pages.keys.width * QUERIES),
        s(TILE * QUERIES),
        read(TILE * std::max(pages.keys.width, pages.values.width)),
        out(QUERIES * pages.values.width) {}
};

// Attend from the queries of a row from number `first` on, as many as a block takes.
void attend(const Call& call, const float* q, int64_t row, int64_t first, BlockRoom& room, float* out) {
  const Pages& pages = call.pages;
  const int64_t all = call.group * call.count, dim = pages.keys.width, width = pages.values.width;
  const int64_t queries = std::min(QUERIES, all - first), length = pages.lengths[row];
  Block block;
  block.lanes = (queries + LANES - 1) / LANES * LANES;
  std::fill(room.q.begin(), room.q.end(), 0.0f);
  std::fill(room.out.begin(), room.out.end(), 0.0f);
  for (int64_t i = 0; i < block.lanes; ++i) {
    const Reach reach(call, row, first + std::min(i, queries - 1));
    const bool beside = call.sinks && i < queries;
    block.at[i] = reach.at, block.open[i] = reach.open, block.closed[i] = reach.closed;
    block.most[i] = beside ? call.sinks[row * call.group + (first + i) / call.count] : LEAST;
    block.sum[i] = beside ? 1 : 0;
    block.all_to = std::min(block.all_to, reach.at);
    block.all_from = std::max(block.all_from, reach.open);
    if (i >= queries) continue;
    block.last = std::max(block.last, reach.at);
    block.first = std::min(block.first, reach.open);
    for (int64_t d = 0; d < dim; ++d) room.q[d * QUERIES + i] = q[(row * all + first + i) * dim + d];
  }
  float* s = room.s.data();
  for (int64_t slot = 0; slot < length; slot += TILE) {
    find_parts(pages, block, row, slot, std::min(slot + TILE, length), room.parts);
    if (room.parts.empty()) continue;
    for (const Part& p : room.parts) {
      fetch(pages.values.data + p.start * pages.values.bytes, p.count * pages.values.bytes);
      const float* keys = numbers(pages.keys, p, room.read.data());
      float* of_part = s + p.offset * QUERIES;
      dots(block.lanes, room.q.data(), keys, p.count, dim, of_part);
      for (int64_t t = 0; t < p.count && call.cap; ++t) bend(of_part + t * QUERIES, block.lanes, *call.cap);
      hide(call, block, p, of_part);
    }
    weigh(room.parts, width, block, s, room.out.data());
    for (const Part& p : room.parts) {
      const float* of_part = s + p.offset * QUERIES;
      const float* values = numbers(pages.values, p, room.read.data());
      for (int64_t i = 0; i < queries; i += 4)  // results of lanes without a query are not read
        mix<4, 1, QUERIES>(of_part + i, values, p.count, width, room.out.data() + i * width);
    }
  }
  for (int64_t i = 0; i < queries; ++i)
    for (int64_t d = 0; d < width; ++d)
      out[(row * all + first + i) * width + d] = block.sum[i] == 0 ? 0.0f : room.out[i * width + d] / block.sum[i];
}

void attend_all(const Call& call, const float* q, int64_t threads, float* out) {
  const int64_t blocks = (call.group * call.count + QUERIES - 1) / QUERIES, number = call.pages.rows;
#pragma omp parallel num_threads(threads) if (threads > 1 && number * blocks > 1)
  {
    BlockRoom room(call.pages);
#pragma omp for schedule(dynamic)
    for (int64_t i = 0; i < number * blocks; ++i) attend(call, q, i / blocks, i % blocks * QUERIES, room, out);
  }
}

}  // namespace

// q [pages.rows, G, count, D] float32, already scaled; gate [P, page] or null; at [rows / heads, count]: token indices of the
// queries, or null if they see all tokens; window and recent 0 for none; cap [1] and sinks [rows, G], or null; out
// [rows, G, count, Dv] float32; weights [rows, G, slots] float32, or null, as count > 1 requires. All are contiguous.
extern "C" void paged_attention(const Pages* pages, const float* q, const bool* gate, const int64_t* at, int64_t heads,
                                int64_t group, int64_t count, int64_t window, int64_t recent, int64_t slots,
                                int64_t threads, const float* cap, const float* sinks, float* out, float* weights) {
  const Call call = {*pages, gate, at, heads, group, count, window, recent, cap, sinks};
  if (count == 1) decode(call, q, slots, threads, out, weights);
  else attend_all(call, q, threads, out);
}
