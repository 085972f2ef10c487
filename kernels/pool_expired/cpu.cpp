// The tokens that leave the recent ones, or the window, when a new token comes: one pass over the ranks of each row.
// Plain C at the border, so that it compiles in a second or two, without the headers of PyTorch.

#include <algorithm>
#include <cstdint>

// ranks [P, page], gate [P, page] or null, table [R, most], lengths [R], new_ranks [R / heads], below 0 where there is no
// new token; recent and window 0 for none; out [R, 2]: slots, -1 for none. All contiguous.
extern "C" void pool_expired(const int32_t* ranks, const bool* gate, const int32_t* table, const int32_t* lengths,
                             const int64_t* new_ranks, int64_t rows, int64_t heads, int64_t most, int64_t page,
                             int64_t recent, int64_t window, int32_t* out) {
  for (int64_t row = 0; row < rows; ++row, out += 2) {
    out[0] = out[1] = -1;
    const int64_t rank = new_ranks[row / heads];
    // ranks of no token where nothing is asked
    const int32_t leaves = recent && rank >= recent ? static_cast<int32_t>(rank - recent) : -1;
    const int32_t ends = window && rank >= window ? static_cast<int32_t>(rank - window) : -1;
    if (leaves < 0 && ends < 0) continue;
    for (int64_t start = 0; start < lengths[row]; start += page) {
      const int64_t first = table[row * most + start / page] * page;
      const int64_t count = std::min<int64_t>(page, lengths[row] - start);
      bool near = false;  // one comparison a token, which compilers put side by side
      for (int64_t t = 0; t < count; ++t) near |= (ranks[first + t] == leaves) | (ranks[first + t] == ends);
      for (int64_t t = 0; near && t < count; ++t) {
        if (ends >= 0 && ranks[first + t] == ends)
          out[1] = static_cast<int32_t>(start + t);
        else if (leaves >= 0 && ranks[first + t] == leaves && !(gate && gate[first + t]))
          out[0] = static_cast<int32_t>(start + t);
      }
    }
  }
}
