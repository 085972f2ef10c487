// Several new tokens per sequence against rows of keys and values in pages.
//
// A block of queries of a row goes through the row's pages, a few at a time, with a running softmax. Queries lie side by
// side in registers where logits are made, so that no register is summed up, and numbers of a value where values are
// mixed. What a query sees is decided by ranks. The order of sums depends on slots alone.
// Plain C at the border, so that it compiles in a second or two, without the headers of PyTorch.

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "logits.h"
#include "pages.h"
#include "softmax.h"

namespace {

constexpr int64_t TILE = 64;            // slots between two looks at the maxima
constexpr float LEAST = -std::numeric_limits<float>::max();

struct Rows {
  const Pages& pages;
  const bool* gate;  // null: gates do not matter
  int64_t group, count, window, recent;  // count: queries of a head; window, recent 0: none
  const float *cap, *sinks;              // of logits; [rows, group]; null: none
};

// What a block of queries sees and has seen; each array has a number for each query, `lanes` of them in use.
struct Block {
  int64_t lanes;
  int32_t at[QUERIES], open[QUERIES], closed[QUERIES];  // a token is seen of a rank above one of the latter, up to `at`
  float most[QUERIES], sum[QUERIES];
  int32_t last = -1, first = std::numeric_limits<int32_t>::max();  // of all: the largest `at`, the smallest `open`
  int32_t all_to = first, all_from = -1;  // and the smallest `at`, the largest `open`: what lies between all see
};

// The parts of slots [slot, end) of a row that some query may see.
void find_parts(const Pages& pages, const Block& block, int64_t row, int64_t slot, int64_t end,
                std::vector<Part>& parts) {
  parts.clear();
  for (int64_t begin = slot; slot < end;) {
    const Part p = pages.part(row, slot, end, begin);
    const auto [low, high] = std::minmax_element(pages.ranks + p.start, pages.ranks + p.start + p.count);
    slot += p.count;
    if (*low > block.last || *high <= block.first) continue;
    if (!parts.empty() && parts.back().start + parts.back().count == p.start &&
        parts.back().offset + parts.back().count == p.offset)
      parts.back().count += p.count;  // pages that lie side by side are worked on at once
    else parts.push_back(p);
  }
}

// Logits of a part become -infinity where a query does not see the token.
void hide(const Rows& rows, const Block& block, const Part& p, float* s) {
  for (int64_t t = 0; t < p.count; ++t) {
    const int32_t rank = rows.pages.ranks[p.start + t];
    const bool closed = rows.gate && !rows.gate[p.start + t];
    if (!closed && rank <= block.all_to && rank > block.all_from) continue;
    const int32_t* low = closed ? block.closed : block.open;
    float* of_token = s + t * QUERIES;
#pragma omp simd
    for (int64_t q = 0; q < block.lanes; ++q)
      of_token[q] = (rank <= block.at[q]) & (rank > low[q]) ? of_token[q] : -std::numeric_limits<float>::infinity();
  }
}

// Logits of a tile become weights, whose sums grow; out shrinks as the maxima grow.
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

// Room that a thread has for a block.
struct Room {
  std::vector<float> q, s, read, out;
  std::vector<Part> parts;
  explicit Room(const Pages& pages)
      : q(pages.keys.width * QUERIES),
        s(TILE * QUERIES),
        read(TILE * std::max(pages.keys.width, pages.values.width)),
        out(QUERIES * pages.values.width) {}
};

void attend(const Rows& rows, const float* q, const int32_t* at, int64_t row, int64_t first, Room& room, float* out) {
  const Pages& pages = rows.pages;
  const int64_t all = rows.group * rows.count, dim = pages.keys.width, width = pages.values.width;
  const int64_t queries = std::min(QUERIES, all - first), length = pages.lengths[row];
  Block block;
  block.lanes = (queries + LANES - 1) / LANES * LANES;
  std::fill(room.q.begin(), room.q.end(), 0.0f);
  std::fill(room.out.begin(), room.out.end(), 0.0f);
  for (int64_t i = 0; i < block.lanes; ++i) {
    const int64_t rank = i < queries ? at[(first + i) % rows.count] : -1;
    const int64_t lowest = std::numeric_limits<int32_t>::min();
    block.at[i] = static_cast<int32_t>(rank);
    block.open[i] = static_cast<int32_t>(rows.window ? std::max(rank - rows.window, lowest) : lowest);
    block.closed[i] = static_cast<int32_t>(std::max<int64_t>(block.open[i], rank - rows.recent));
    const bool beside = rows.sinks && i < queries;
    block.most[i] = beside ? rows.sinks[row * rows.group + (first + i) / rows.count] : LEAST;
    block.sum[i] = beside ? 1 : 0;
    block.all_to = std::min(block.all_to, block.at[i]);
    block.all_from = std::max(block.all_from, block.open[i]);
    if (i >= queries) continue;
    block.last = std::max(block.last, block.at[i]);
    block.first = std::min(block.first, block.open[i]);
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
      for (int64_t t = 0; t < p.count && rows.cap; ++t) bend(of_part + t * QUERIES, block.lanes, *rows.cap);
      hide(rows, block, p, of_part);
    }
    weigh(room.parts, width, block, s, room.out.data());
    for (const Part& p : room.parts) {
      const float* of_part = s + p.offset * QUERIES;
      const float* values = numbers(pages.values, p, room.read.data());
      for (int64_t i = 0; i < queries; i += 4)  // the last ones may be no queries, whose weights are 0
        mix<4, 1, QUERIES>(of_part + i, values, p.count, width, room.out.data() + i * width);
    }
  }
  for (int64_t i = 0; i < queries; ++i)
    for (int64_t d = 0; d < width; ++d)
      out[(row * all + first + i) * width + d] = block.sum[i] == 0 ? 0.0f : room.out[i * width + d] / block.sum[i];
}

}  // namespace

// q [pages.rows, G, count, D] float32, scaled already; gate [P, page] or null; at [rows / heads, count]: ranks of the
// queries; window and recent 0 for none; cap [1] and sinks [rows, G], or null; out [rows, G, count, Dv] float32. All
// contiguous.
extern "C" void paged_attend(const Pages* pages, const float* q, const bool* gate, const int32_t* at, int64_t heads,
                             int64_t group, int64_t count, int64_t window, int64_t recent, int64_t threads,
                             const float* cap, const float* sinks, float* out) {
  const Rows rows = {*pages, gate, group, count, window, recent, cap, sinks};
  const int64_t blocks = (group * count + QUERIES - 1) / QUERIES, number = pages->rows;
#pragma omp parallel num_threads(threads) if (threads > 1 && number * blocks > 1)
  {
    Room room(*pages);
#pragma omp for schedule(dynamic)
    for (int64_t i = 0; i < number * blocks; ++i)
      attend(rows, q, at + i / blocks / heads * count, i / blocks, i % blocks * QUERIES, room, out);
  }
}
