// New tokens into rows that lie in pages, in place of tokens that go: a few copies of one token a row.
//
// One thread: what a step copies is smaller than what starting others costs. Keys and values are bytes here, of any type.
// Plain C at the border, so that it compiles in a second or two, without the headers of PyTorch.

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace {

// A column of a pool: bytes of one token each, and where the new tokens' bytes are.
struct Column {
  char* pool;
  const char* fresh;
  int64_t bytes;
};

// The slots of what the query of a token of this rank no longer sees, the highest first, -1 for none: the token of rank
// `rank - recent` where its gate is closed (or there is none), and that of rank `rank - window`; 0 for none of either.
void out_of_reach(const int32_t* ranks, const char* gate, const int32_t* pages, int64_t length, int64_t page,
                  int64_t rank, int64_t recent, int64_t window, int32_t* out) {
  const int32_t leaves = recent && rank >= recent ? static_cast<int32_t>(rank - recent) : -1;
  const int32_t ends = window && rank >= window ? static_cast<int32_t>(rank - window) : -1;
  out[0] = out[1] = -1;
  if (leaves < 0 && ends < 0) return;
  for (int64_t start = 0; start < length; start += page) {
    const int64_t first = pages[start / page] * page, count = std::min<int64_t>(page, length - start);
    bool near = false;  // one comparison a token, which compilers put side by side
    for (int64_t t = 0; t < count; ++t) near |= (ranks[first + t] == leaves) | (ranks[first + t] == ends);
    for (int64_t t = 0; near && t < count; ++t) {
      const int32_t held = ranks[first + t];
      if ((ends >= 0 && held == ends) || (leaves >= 0 && held == leaves && !(gate && gate[first + t])))
        out[out[0] >= 0] = static_cast<int32_t>(start + t);
    }
  }
  if (out[1] > out[0]) std::swap(out[0], out[1]);
}

}  // namespace

// columns: keys, values and, where there is one, what a gate said, of `kinds` columns; pools[kinds], fresh[kinds] (new
// tokens [R, bytes], null where there are none), bytes[kinds]; ranks [P, page]; table [R, most], lengths [R]; new_ranks
// [R / heads], below 0 where there is no new token, or null; victims [R, most_victims], -1 for none; records: `notes`
// buffers [R, widths[i], slots]. With `recent` or `window` victims are null, and the third column is of one byte: see
// out_of_reach. All contiguous.
extern "C" void pool_append(int64_t kinds, char** pools, const char** fresh, const int64_t* bytes, int32_t* ranks,
                            const int32_t* table, int32_t* lengths, const int64_t* new_ranks, int32_t* victims,
                            int64_t most_victims, int64_t notes, float** records, const int64_t* widths, int64_t slots,
                            int64_t rows, int64_t heads, int64_t most, int64_t page, int64_t recent,
                            int64_t window) {
  for (int64_t row = 0; row < rows; ++row) {
    const int32_t* pages = table + row * most;
    const auto token = [&](int64_t slot) { return pages[slot / page] * page + slot % page; };
    const auto move = [&](int64_t from, int64_t to) {
      const int64_t a = token(from), b = token(to);
      for (int64_t c = 0; c < kinds; ++c) std::memcpy(pools[c] + b * bytes[c], pools[c] + a * bytes[c], bytes[c]);
      ranks[b] = ranks[a];
    };
    const auto record = [&](int64_t from, int64_t to) {  // from < 0: of a new token, which has none yet
      for (int64_t i = 0; i < notes; ++i)
        for (int64_t w = 0; w < widths[i]; ++w) {
          float* of_row = records[i] + (row * widths[i] + w) * slots;
          of_row[to] = from < 0 ? 0.0f : of_row[from];
          if (from >= 0) of_row[from] = 0.0f;
        }
    };
    int64_t length = lengths[row];
    bool waiting = new_ranks && new_ranks[row / heads] >= 0;
    const auto put = [&](int64_t slot) {
      const int64_t b = token(slot);
      for (int64_t c = 0; c < kinds; ++c) std::memcpy(pools[c] + b * bytes[c], fresh[c] + row * bytes[c], bytes[c]);
      ranks[b] = static_cast<int32_t>(new_ranks[row / heads]);
      record(-1, slot);
      waiting = false;
    };
    int32_t found[2], *gone = victims + row * most_victims;
    if (recent || window) {
      most_victims = 2;
      gone = found;
      out_of_reach(ranks, kinds > 2 && recent ? pools[2] : nullptr, pages, length, page,
                   waiting ? new_ranks[row / heads] : -1, recent, window, found);
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
    lengths[row] = static_cast<int32_t>(length);
  }
}
