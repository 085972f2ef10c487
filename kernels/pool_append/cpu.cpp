// New tokens into rows that lie in pages, in place of tokens that go: a few copies of one token a row.
//
// One thread: what a step copies is smaller than what starting others costs. Where the pool holds codes, those of a
// token are made here.
// Plain C at the border, so that it compiles in a second or two, without the headers of PyTorch.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "encode.h"
#include "pages.h"

namespace {

// New tokens [R, width] of a column.
void write(const Column& c, const char* fresh, int64_t row, int64_t place, std::vector<float>& room) {
  char* token = c.data + place * c.bytes;
  if (!c.coded) {  // of any type
    std::memcpy(token, fresh + row * c.bytes, c.bytes);
    return;
  }
  room.resize(c.width);
  widen_all(c.type, fresh + row * c.width * c.number_bytes(), c.width, room.data());
  encode(c, room.data(), token);
}

// The slots of what the query of a token of this rank no longer sees, the highest first, -1 for none: the token of rank
// `rank - recent` where its gate is closed (or there is none), and that of rank `rank - window`; 0 for none of either.
void out_of_reach(const Pages& pages, const char* gate, int64_t row, int64_t rank, int64_t recent, int64_t window,
                  int32_t* out) {
  const int32_t leaves = recent && rank >= recent ? static_cast<int32_t>(rank - recent) : -1;
  const int32_t ends = window && rank >= window ? static_cast<int32_t>(rank - window) : -1;
  out[0] = out[1] = -1;
  if (leaves < 0 && ends < 0) return;
  for (int64_t slot = 0, length = pages.lengths[row]; slot < length;) {
    const Part p = pages.part(row, slot, length, 0);
    const int32_t* ranks = pages.ranks + p.start;
    bool near = false;  // one comparison a token, which compilers put side by side
    for (int64_t t = 0; t < p.count; ++t) near |= (ranks[t] == leaves) | (ranks[t] == ends);
    for (int64_t t = 0; near && t < p.count; ++t)
      if ((ends >= 0 && ranks[t] == ends) || (leaves >= 0 && ranks[t] == leaves && !(gate && gate[p.start + t])))
        out[out[0] >= 0] = static_cast<int32_t>(slot + t);
    slot += p.count;
  }
  if (out[1] > out[0]) std::swap(out[0], out[1]);
}

}  // namespace

// What a pool holds of each token is in `pages`, and in gate [P, page] of `gate_bytes`, or null. new_keys [R, D] and
// new_values [R, Dv] of the columns' type, and new_gate [R], null where there are none; new_ranks [R / heads], below 0
// where there is no new token, or null; victims [R, most_victims], -1 for none; records: `notes` buffers [R, widths[i],
// slots]. With `recent` or `window` victims are null, and the gate is of one byte: see out_of_reach. All contiguous.
extern "C" void pool_append(const Pages* into, char* gate, int64_t gate_bytes, const char* new_keys,
                            const char* new_values, const char* new_gate, const int64_t* new_ranks, int32_t* victims,
                            int64_t most_victims, int64_t notes, float** records, const int64_t* widths, int64_t slots,
                            int64_t heads, int64_t recent, int64_t window) {
  const Pages& pages = *into;
  std::vector<float> room;
  for (int64_t row = 0; row < pages.rows; ++row) {
    const auto token = [&](int64_t slot) { return pages.part(row, slot, slot + 1, 0).start; };
    const auto move = [&](int64_t from, int64_t to) {
      const int64_t a = token(from), b = token(to);
      for (const Column* c : {&pages.keys, &pages.values})
        std::memcpy(c->data + b * c->bytes, c->data + a * c->bytes, c->bytes);
      if (gate) std::memcpy(gate + b * gate_bytes, gate + a * gate_bytes, gate_bytes);
      pages.ranks[b] = pages.ranks[a];
    };
    const auto record = [&](int64_t from, int64_t to) {  // from < 0: of a new token, which has none yet
      for (int64_t i = 0; i < notes; ++i)
        for (int64_t w = 0; w < widths[i]; ++w) {
          float* of_row = records[i] + (row * widths[i] + w) * slots;
          of_row[to] = from < 0 ? 0.0f : of_row[from];
          if (from >= 0) of_row[from] = 0.0f;
        }
    };
    int64_t length = pages.lengths[row];
    const int64_t rank = new_ranks ? new_ranks[row / heads] : -1;
    bool waiting = rank >= 0;
    const auto put = [&](int64_t slot) {
      const int64_t b = token(slot);
      write(pages.keys, new_keys, row, b, room);
      write(pages.values, new_values, row, b, room);
      if (gate) std::memcpy(gate + b * gate_bytes, new_gate + row * gate_bytes, gate_bytes);
      pages.ranks[b] = static_cast<int32_t>(rank);
      record(-1, slot);
      waiting = false;
    };
    int32_t found[2], *gone = victims + row * most_victims;
    if (recent || window) {
      most_victims = 2;
      gone = found;
      out_of_reach(pages, recent ? gate : nullptr, row, rank, recent, window, found);
    } else if (most_victims > 1) std::sort(gone, gone + most_victims, [](int32_t a, int32_t b) { return a > b; });
    for (int64_t v = 0; v < most_victims && gone[v] >= 0; ++v) {
      const int64_t slot = gone[v];
      if (waiting && slot == length) {  // the new token itself
        waiting = false;
      } else if (waiting) {
        put(slot);
      } else {
        --length;
        if (slot != length) move(length, slot);
        if (slot != length) record(length, slot);
        else record(-1, slot);
      }
    }
    if (waiting) put(length++);
    pages.lengths[row] = static_cast<int32_t>(length);
  }
}
