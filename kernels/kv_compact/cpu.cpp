// Compaction of rows in blocks: tokens go by their scores, and the last tokens of a row fill the holes.
//
// Plain C at the border, so that it compiles in a second or two, without the headers of PyTorch.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "pages.h"

namespace {

constexpr float INF = std::numeric_limits<float>::infinity();

// Numbers that move with a token beside its columns: `count` buffers [R, widths[2 i], widths[2 i + 1]].
struct Records {
  int64_t count;
  float** data;
  const int64_t* widths;

  template <typename Change>
  void each(int64_t row, const Change& change) const {
    for (int64_t i = 0; i < count; ++i)
      for (int64_t w = 0; w < widths[2 * i]; ++w) change(data[i] + (row * widths[2 * i] + w) * widths[2 * i + 1]);
  }
};

// Fill the holes below `kept` with the tokens that stay from there on, in their order.
void close(const Pages& pages, char* gate, int64_t gate_bytes, const Records& records, int64_t row,
           const std::vector<uint8_t>& goes, int64_t kept) {
  const int64_t length = pages.lengths[row];
  for (int64_t hole = 0, from = kept; hole < kept; ++hole) {
    if (!goes[hole]) continue;
    while (goes[from]) ++from;
    const int64_t a = pages.part(row, from, from + 1, 0).start, b = pages.part(row, hole, hole + 1, 0).start;
    for (const Column* c : {&pages.keys, &pages.values})
      std::memcpy(c->data + b * c->bytes, c->data + a * c->bytes, c->bytes);
    pages.token_indices[b] = pages.token_indices[a];
    if (gate) std::memcpy(gate + b * gate_bytes, gate + a * gate_bytes, gate_bytes);
    records.each(row, [&](float* of_row) { of_row[hole] = of_row[from]; });
    ++from;
  }
  records.each(row, [&](float* of_row) { std::fill(of_row + kept, of_row + length, 0.0f); });
  pages.lengths[row] = static_cast<int32_t>(kept);
}

struct Rival {
  float score;
  int32_t token_index, slot;
  bool operator<(const Rival& o) const { return score != o.score ? score < o.score : token_index > o.token_index; }
};

}  // namespace

// See ag.kernels.kv_compact. The scores of sequence b and head h lie by slot from
// score + b * score_sequence + h * score_head on.
extern "C" void kv_compact(const Pages* rows, char* gate, int64_t gate_bytes, int64_t heads, int64_t threads,
                           int64_t notes, float** data, const int64_t* widths, const float* score,
                           int64_t score_sequence, int64_t score_head, const int32_t* keep_count, int32_t* nonfinite) {
  const Pages& pages = *rows;
  const Records records = {notes, data, widths};
  int64_t work = 0;
  for (int64_t row = 0; row < pages.rows; ++row) work += pages.lengths[row];
  const int64_t some = work < 16384 ? 1 : threads;  // starting threads costs more than few tokens
#pragma omp parallel for num_threads(some) schedule(static)
  for (int64_t row = 0; row < pages.rows; ++row) {
    std::vector<Rival> rivals;
    bool wrong = false;
    const int64_t length = pages.lengths[row], surplus = length - keep_count[row];
    if (surplus <= 0) continue;
    const float* scores = score + row / heads * score_sequence + row % heads * score_head;
    for (int64_t slot = 0; slot < length;) {
      const Part p = pages.part(row, slot, length, 0);
      for (int64_t t = 0; t < p.count; ++t) {
        const int32_t at = static_cast<int32_t>(slot + t);
        if (scores[at] == INF) continue;
        wrong |= std::isnan(scores[at]);
        const Rival rival = {std::isnan(scores[at]) ? -INF : scores[at], pages.token_indices[p.start + t], at};
        if (surplus > 1 || rivals.empty()) rivals.push_back(rival);
        else if (rival < rivals[0]) rivals[0] = rival;
      }
      slot += p.count;
    }
    const int64_t going = std::min<int64_t>(surplus, rivals.size());
    std::nth_element(rivals.begin(), rivals.begin() + going, rivals.end());
    std::vector<uint8_t> goes(length);
    for (int64_t i = 0; i < going; ++i) goes[rivals[i].slot] = 1;
    if (wrong && nonfinite) nonfinite[row] = 1;
    if (going) close(pages, gate, gate_bytes, records, row, goes, length - going);
  }
}
