// The largest attention weight that any query of a head gives each key.
//
// A block of queries goes through the keys once: their logits stay in memory near the core while the sums of their
// softmax run along. Then each key gets the largest logit less what its query's row sums to. A maximum does not depend on
// the order in which it is taken, so that threads may share a head.
// Plain C at the border, so that it compiles in a second or two, without the headers of PyTorch.

#include <cmath>
#include <cstdint>
#include <limits>

#include "logits.h"

namespace {

constexpr int64_t TILE = 64;  // keys between two looks at the maxima
constexpr float NONE = -std::numeric_limits<float>::infinity();
constexpr float LEAST = -std::numeric_limits<float>::max();

struct Sizes {
  int64_t heads, kv_heads, count, length, dim, window;  // count: queries of a head; window 0: none
};

// What a thread needs for a block.
struct Room {
  std::vector<float> q, s, best;
  explicit Room(const Sizes& n) : q(n.dim * QUERIES), s(n.length * QUERIES), best(n.length) {}
};

// A block of queries: each sees the keys above `low`, up to `at`. The arrays have a number for each, `lanes` in use.
struct Block {
  int64_t lanes, begin, end;
  int64_t at[QUERIES], low[QUERIES];
  float most[QUERIES], sum[QUERIES];
};

// Logits of a key become -infinity where a query does not see it.
void hide(const Block& block, int64_t t, bool valid, float* s) {
#pragma omp simd
  for (int64_t i = 0; i < block.lanes; ++i) s[i] = valid & (t <= block.at[i]) & (t > block.low[i]) ? s[i] : NONE;
}

// The logits of a tile join the sums.
void gather(Block& block, const float* s, int64_t count) {
  for (int64_t lane = 0; lane < block.lanes; lane += LANES) {
    const Lanes before = load(block.most + lane);
    Lanes most = before, sum = {};
    for (int64_t t = 0; t < count; ++t) {
      const Lanes x = load(s + t * QUERIES + lane);
      most = x > most ? x : most;
    }
    store(block.most + lane, most);
    for (int64_t t = 0; t < count; ++t) {
      float weights[LANES];
#pragma omp simd
      for (int i = 0; i < LANES; ++i) weights[i] = exp_negative(s[t * QUERIES + lane + i] - block.most[lane + i]);
      sum += load(weights);
    }
    for (int i = 0; i < LANES; ++i)
      block.sum[lane + i] = block.sum[lane + i] * exp_negative(before[i] - most[i]) + sum[i];
  }
}

// Of the queries at the places `taken`, of one head: `room.best` gets the logarithm of the largest weight of each key in
// [begin, end) of the block.
void fill(const Sizes& n, const float* q, const float* k, const bool* valid, const float* factors, const int64_t* taken,
          int64_t queries, Block& block, Room& room) {
  block.lanes = (queries + LANES - 1) / LANES * LANES;
  block.begin = n.length, block.end = 0;
  int64_t all_see = n.length, lowest = -1;  // keys that all queries see lie above `lowest`, below `all_see`
  std::fill(room.q.begin(), room.q.end(), 0.0f);
  for (int64_t i = 0; i < block.lanes; ++i) {
    const int64_t j = taken[std::min(i, queries - 1)];  // lanes without a query repeat the last one
    block.at[i] = n.length - n.count + j;
    block.low[i] = n.window ? std::max<int64_t>(block.at[i] - n.window, -1) : -1;
    block.most[i] = LEAST;
    block.sum[i] = 0;
    block.begin = std::min(block.begin, block.low[i] + 1);
    block.end = std::max(block.end, block.at[i] + 1);
    all_see = std::min(all_see, block.at[i] + 1);
    lowest = std::max(lowest, block.low[i]);
    for (int64_t d = 0; d < n.dim; ++d) room.q[d * QUERIES + i] = q[j * n.dim + d];
  }
  for (int64_t t = block.begin; t < block.end; t += TILE) {
    const int64_t end = std::min(t + TILE, block.end);
    float* s = room.s.data() + t * QUERIES;
    dots(block.lanes, room.q.data(), k + t * n.dim, end - t, n.dim, s);
    if (valid || end > all_see || t <= lowest)
      for (int64_t u = t; u < end; ++u) hide(block, u, !valid || valid[u], s + (u - t) * QUERIES);
    gather(block, s, end - t);
  }
  float total[QUERIES];  // logarithm of what the weights of a query are divided by
  for (int64_t i = 0; i < block.lanes; ++i) {
    const float factor = factors ? factors[taken[std::min(i, queries - 1)]] : 1.0f;
    total[i] = block.sum[i] > 0 && factor > 0 ? block.most[i] + std::log(block.sum[i] / factor) : -NONE;
  }
  for (int64_t t = block.begin; t < block.end; ++t) {
    const float* s = room.s.data() + t * QUERIES;
    Lanes most = load(s) - load(total);
    for (int64_t lane = LANES; lane < block.lanes; lane += LANES) {
      const Lanes x = load(s + lane) - load(total + lane);
      most = x > most ? x : most;
    }
    float best = NONE;
    for (int i = 0; i < LANES; ++i) best = most[i] > best ? most[i] : best;
    room.best[t] = best;
  }
}

}  // namespace

// q [batch, heads, count, dim] float32, scaled already, of the last of `length` tokens; k [batch, kv_heads, length, dim]
// float32; counted [batch, count]; valid [batch, length] and factors [batch, count] float32, or null; window 0 for none;
// out [batch, heads, length] float32: the logarithm of the largest weight, -infinity where no query counts. All contiguous.
extern "C" void column_max(const float* q, const float* k, const bool* counted, const bool* valid, const float* factors,
                           int64_t batch, int64_t heads, int64_t kv_heads, int64_t count, int64_t length, int64_t dim,
                           int64_t window, int64_t threads, float* out) {
  const Sizes n = {heads, kv_heads, count, length, dim, window};
  std::fill_n(out, batch * heads * length, NONE);
  for (int64_t b = 0; b < batch; ++b) {
    std::vector<int64_t> taken;
    for (int64_t j = 0; j < count; ++j)
      if (counted[b * count + j]) taken.push_back(j);
    const int64_t many = taken.size(), blocks = (many + QUERIES - 1) / QUERIES;
#pragma omp parallel num_threads(threads) if (threads > 1 && heads * blocks > 1)
    {
      Room room(n);
      Block block;
#pragma omp for schedule(dynamic)
      for (int64_t item = 0; item < heads * blocks; ++item) {
        const int64_t h = item / blocks, first = item % blocks * QUERIES, queries = std::min(QUERIES, many - first);
        const float* keys = k + (b * kv_heads + h / (heads / kv_heads)) * length * dim;
        fill(n, q + (b * heads + h) * count * dim, keys, valid ? valid + b * length : nullptr,
             factors ? factors + b * count : nullptr, taken.data() + first, queries, block, room);
        float* of_head = out + (b * heads + h) * length;
#pragma omp critical
        for (int64_t t = block.begin; t < block.end; ++t) of_head[t] = std::max(of_head[t], room.best[t]);
      }
    }
  }
}
