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

}  // namespace

// columns: keys, values and, where there is one, what a gate said, of `kinds` columns; pools[kinds], fresh[kinds] (new
// tokens [R, bytes], null where there are none), bytes[kinds]; ranks [P, page]; table [R, most], lengths [R]; new_ranks
// [R / heads], below 0 where there is no new token, or null; victims [R, most_victims], -1 for none; records: `notes`
// buffers [R, widths[i], slots]. All contiguous.
extern "C" void pool_append(int64_t kinds, char** pools, const char** fresh, const int64_t* bytes, int32_t* ranks,
                            const int32_t* table, int32_t* lengths, const int64_t* new_ranks, int32_t* victims,
                            int64_t most_victims, int64_t notes, float** records, const int64_t* widths, int64_t slots,
                            int64_t rows, int64_t heads, int64_t most, int64_t page) {
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
    int32_t* gone = victims + row * most_victims;
    if (most_victims > 1) std::sort(gone, gone + most_victims, [](int32_t a, int32_t b) { return a > b; });
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
