// The sum, the maximum or the sum of squares of the attention weights of each key.
//
// A block of queries reads the keys once, tile by tile. It keeps the exponentials of a tile, relative to the largest
// logit so far, in the core's cache, and adds them up. When the row sums are known, the exponentials become weights.
// The blocks of a head form parts with separate results, which are added in order, so that the number of threads
// changes nothing.
// Plain C at the border, so that it compiles in a second or two, without the headers of PyTorch.

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "logits.h"

namespace {

constexpr int64_t TILE = 64;   // keys between two updates of the maxima
constexpr int64_t PARTS = 8;   // of a head, which threads share
constexpr float NONE = -std::numeric_limits<float>::infinity(), LEAST = -std::numeric_limits<float>::max();
constexpr int32_t NEWEST = std::numeric_limits<int32_t>::max();

enum Kind { SUM, MAX, SQUARES };

struct Call {
  int64_t heads, kv_heads, queries, length, dim, window, skip;  // of a head: queries, keys; window 0 means none
  const float *cap, *sinks;                                     // [1]; [heads]; null: none
};

// Token indices of the tokens of a tile: the smallest, the largest, and whether some slot has no token.
struct Span {
  int32_t low = NEWEST, high = -1;
  bool holes = false;
};

// Memory of a thread for a block.
struct Room {
  std::vector<float> q, e, most;
  Room(const Call& call)
      : q(call.dim * QUERIES), e(call.length * QUERIES), most((call.length + TILE - 1) / TILE * QUERIES) {}
};

// A block of queries, of which `lanes` are in use. Query i sees tokens with low[i] < index <= at[i], and adds to the
// statistic of tokens with index <= last[i] alone.
struct Block {
  int64_t lanes;
  int32_t at[QUERIES], low[QUERIES], last[QUERIES];
  float most[QUERIES], sum[QUERIES];
  int32_t newest = -1, oldest = NEWEST;     // some query sees tokens of an index above `oldest`, up to `newest`
  int32_t all_to = NEWEST, all_from = -1;   // all queries see tokens of an index above `all_from`, up to `all_to`
  int32_t all_count_to = NEWEST;            // all queries count for tokens up to this index

  bool meets(const Span& span) const { return span.low <= newest && span.high > oldest; }
  bool all_see(const Span& span) const { return !span.holes && span.high <= all_to && span.low > all_from; }
};

// Replace the logits of a tile [keys][QUERIES] by exponentials relative to the largest logit so far, and add them up.
void gather(Block& block, float* s, int64_t keys) {
  for (int64_t lane = 0; lane < block.lanes; lane += LANES) {
    const Lanes before = load(block.most + lane);
    Lanes most = before, sum = {};
    for (int64_t t = 0; t < keys; ++t) {
      const Lanes x = load(s + t * QUERIES + lane);
      most = x > most ? x : most;
    }
    store(block.most + lane, most);
    for (int64_t t = 0; t < keys; ++t) {
      float* e = s + t * QUERIES + lane;
#pragma omp simd
      for (int i = 0; i < LANES; ++i) e[i] = exp_negative(e[i] - block.most[lane + i]);
      sum += load(e);
    }
    for (int i = 0; i < LANES; ++i)
      block.sum[lane + i] = block.sum[lane + i] * exp_negative(before[i] - most[i]) + sum[i];
  }
}

// The larger number; NaN if one is NaN, in any order: a comparison with NaN is false.
template <typename T>
inline T larger(T a, T b) {
  return (a > b) | (a != a) ? a : b;
}

// The statistic of one key over a block, whose weights are the exponentials e times `shares`.
template <int KIND>
float key_statistic(const Block& block, const float* e, const float* shares, int32_t token_index, bool all_count) {
  Lanes found = {};
  for (int64_t lane = 0; lane < block.lanes; lane += LANES) {
    Lanes a = load(e + lane) * load(shares + lane);
    if (!all_count) {
      float counted[LANES];
#pragma omp simd
      for (int i = 0; i < LANES; ++i) counted[i] = token_index <= block.last[lane + i] ? a[i] : 0.0f;
      a = load(counted);
    }
    if constexpr (KIND == MAX) found = larger(a, found);
    else found += KIND == SUM ? a : a * a;
  }
  if constexpr (KIND != MAX) return total(found);
  float most = 0;
  for (int i = 0; i < LANES; ++i) most = larger<float>(found[i], most);
  return most;
}

// Add the statistics of the queries at the places `taken` of a head to `out` [length].
template <int KIND>
void take(const Call& call, const float* q, const float* k, const int32_t* at, const int32_t* token_indices,
          const std::vector<Span>& spans, const float* factors, const float* sink, const int64_t* taken,
          int64_t queries, Room& room, float* out) {
  Block block;
  block.lanes = (queries + LANES - 1) / LANES * LANES;
  std::fill(room.q.begin(), room.q.end(), 0.0f);
  for (int64_t i = 0; i < block.lanes; ++i) {
    const int64_t j = taken[std::min(i, queries - 1)];  // lanes without a query repeat the last one, with weights of 0
    block.at[i] = at[j];
    block.low[i] = static_cast<int32_t>(call.window ? std::max<int64_t>(at[j] - call.window, -1) : -1);
    block.last[i] = static_cast<int32_t>(at[j] - call.skip);
    block.most[i] = sink ? *sink : LEAST;
    block.sum[i] = sink ? 1 : 0;
    block.newest = std::max(block.newest, block.at[i]);
    block.oldest = std::min(block.oldest, block.low[i]);
    block.all_to = std::min(block.all_to, block.at[i]);
    block.all_from = std::max(block.all_from, block.low[i]);
    block.all_count_to = std::min(block.all_count_to, block.last[i]);
    for (int64_t d = 0; d < call.dim; ++d) room.q[d * QUERIES + i] = q[j * call.dim + d];
  }
  const int64_t tiles = static_cast<int64_t>(spans.size());
  for (int64_t n = 0; n < tiles; ++n) {
    if (!block.meets(spans[n])) continue;
    const int64_t start = n * TILE, keys = std::min(TILE, call.length - start);
    float* s = room.e.data() + start * QUERIES;
    dots(block.lanes, room.q.data(), k + start * call.dim, keys, call.dim, s);
    for (int64_t t = 0; t < keys && call.cap; ++t) bend(s + t * QUERIES, block.lanes, *call.cap);
    for (int64_t t = 0; t < keys && !block.all_see(spans[n]); ++t) {
      const int32_t token_index = token_indices[start + t];
      float* of_key = s + t * QUERIES;
#pragma omp simd
      for (int64_t i = 0; i < block.lanes; ++i)
        of_key[i] = (token_index <= block.at[i]) & (token_index > block.low[i]) ? of_key[i] : NONE;
    }
    gather(block, s, keys);
    std::copy_n(block.most, block.lanes, room.most.data() + n * QUERIES);
  }
  float scale[QUERIES] = {};  // from exponentials, relative to the largest logit of all, to weights
  for (int64_t i = 0; i < queries; ++i)
    scale[i] = block.sum[i] == 0 ? 0 : (factors ? factors[taken[i]] : 1.0f) / block.sum[i];
  for (int64_t n = 0; n < tiles; ++n) {
    if (!block.meets(spans[n])) continue;
    float shares[QUERIES];
    for (int64_t i = 0; i < block.lanes; ++i)
      shares[i] = scale[i] * exp_negative(room.most[n * QUERIES + i] - block.most[i]);
    const bool all_count = spans[n].high <= block.all_count_to;
    for (int64_t t = n * TILE; t < std::min(n * TILE + TILE, call.length); ++t) {
      if (token_indices[t] < 0) continue;
      const float found = key_statistic<KIND>(block, room.e.data() + t * QUERIES, shares, token_indices[t], all_count);
      if constexpr (KIND == MAX) out[t] = larger(found, out[t]);
      else out[t] += found;
    }
  }
}

std::vector<Span> spans_of(const int32_t* token_indices, int64_t length) {
  std::vector<Span> spans((length + TILE - 1) / TILE);
  for (int64_t t = 0; t < length; ++t) {
    Span& span = spans[t / TILE];
    if (token_indices[t] < 0) span.holes = true;
    else span.low = std::min(span.low, token_indices[t]), span.high = std::max(span.high, token_indices[t]);
  }
  return spans;
}

template <int KIND>
void stats(const Call& call, const float* q, const float* k, const int32_t* at, const int32_t* token_indices,
           int64_t index_heads, const float* factors, int64_t batch, int64_t threads, float* out) {
  const int64_t rows = call.heads * call.length;
  std::vector<float> parts(PARTS * rows);
  for (int64_t b = 0; b < batch; ++b) {
    std::vector<int64_t> taken;
    for (int64_t j = 0; j < call.queries; ++j)
      if (at[b * call.queries + j] >= 0) taken.push_back(j);
    std::vector<std::vector<Span>> spans;
    for (int64_t h = 0; h < index_heads; ++h)
      spans.push_back(spans_of(token_indices + (b * index_heads + h) * call.length, call.length));
    const int64_t many = static_cast<int64_t>(taken.size()), blocks = (many + QUERIES - 1) / QUERIES;
    const int64_t some = (blocks + PARTS - 1) / PARTS;  // blocks of a part
    const int64_t used = some ? (blocks + some - 1) / some : 0;
    std::fill_n(parts.begin(), used * rows, 0.0f);
#pragma omp parallel num_threads(threads) if (threads > 1 && call.heads * used > 1)
    {
      Room room(call);
#pragma omp for schedule(dynamic)
      for (int64_t item = 0; item < call.heads * used; ++item) {
        const int64_t h = item / used, part = item % used, kv = h / (call.heads / call.kv_heads);
        const int64_t of_indices = index_heads == 1 ? 0 : kv;
        for (int64_t n = part * some; n < std::min(part * some + some, blocks); ++n)
          take<KIND>(call, q + (b * call.heads + h) * call.queries * call.dim,
                     k + (b * call.kv_heads + kv) * call.length * call.dim, at + b * call.queries,
                     token_indices + (b * index_heads + of_indices) * call.length, spans[of_indices],
                     factors ? factors + b * call.queries : nullptr, call.sinks ? call.sinks + h : nullptr,
                     taken.data() + n * QUERIES, std::min(QUERIES, many - n * QUERIES), room,
                     parts.data() + part * rows + h * call.length);
      }
    }
    float* of_sequence = out + b * rows;
    std::fill_n(of_sequence, rows, 0.0f);
    for (int64_t part = 0; part < used; ++part)
      for (int64_t i = 0; i < rows; ++i) {
        const float found = parts[part * rows + i];
        of_sequence[i] = KIND == MAX ? larger(found, of_sequence[i]) : of_sequence[i] + found;
      }
  }
}

}  // namespace

// q [batch, heads, queries, dim] float32, already scaled; k [batch, kv_heads, length, dim] float32; at [batch, queries]
// and token_indices [batch, index_heads, length], below 0: none; factors [batch, queries] float32, or null; window 0:
// none; cap [1] and sinks [heads], or null; out [batch, heads, length] float32. All are contiguous.
extern "C" void attention_stats(int64_t kind, const float* q, const float* k, const int32_t* at,
                                const int32_t* token_indices, int64_t index_heads, const float* factors, int64_t batch,
                                int64_t heads, int64_t kv_heads, int64_t queries, int64_t length, int64_t dim,
                                int64_t window, int64_t skip, int64_t threads, const float* cap, const float* sinks,
                                float* out) {
  const Call call = {heads, kv_heads, queries, length, dim, window, skip, cap, sinks};
  const auto run = kind == SUM ? stats<SUM> : kind == MAX ? stats<MAX> : stats<SQUARES>;
  run(call, q, k, at, token_indices, index_heads, factors, batch, threads, out);
}
