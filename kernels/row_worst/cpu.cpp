// The worst token of each row: one pass over scores and two masks, on one thread (a decoding step has few rows).
// Plain C at the border, so that it compiles in a second or two, without the headers of PyTorch.

#include <cmath>
#include <cstdint>
#include <limits>

// score, guarded (those that are protected), valid and ranks, or null, [rows, width]; counts [2, rows]: tokens,
// protected tokens; finite [rows]: whether all scores that compete are; slots [rows]: of the lowest score, of equal ones
// that of the highest rank, without ranks the last; -1 for none.
// With a capacity [rows / heads], counts and finite are null: slots are -1, too, where no more is held than it and what
// is protected; found [rows] gets the bits 1, where a score is not finite, and 2, where more is protected than it.
extern "C" void row_worst(const float* score, const bool* guarded, const bool* valid, const int32_t* ranks,
                          int64_t rows, int64_t width, int64_t* counts, bool* finite, int32_t* slots,
                          const int64_t* capacity, int64_t heads, uint8_t* found) {
  for (int64_t row = 0; row < rows; ++row, score += width, guarded += width, valid += width) {
    int64_t held = 0, fixed = 0, place = -1, newest = -1;
    float lowest = std::numeric_limits<float>::infinity();
    bool all = true;
    for (int64_t t = 0; t < width; ++t) {
      if (!valid[t]) continue;
      ++held;
      if (guarded[t]) {
        ++fixed;
        continue;
      }
      all &= std::isfinite(score[t]);
      if (score[t] > lowest) continue;
      const int64_t rank = ranks ? ranks[row * width + t] : t;
      if (score[t] < lowest || (score[t] == lowest && rank > newest)) {
        lowest = score[t];
        newest = rank;
        place = t;
      }
    }
    if (capacity) {
      const int64_t room = capacity[row / heads];
      if (held <= (fixed > room ? fixed : room)) place = -1;
      found[row] |= static_cast<uint8_t>((all ? 0 : 1) | (fixed > room ? 2 : 0));
    } else {
      counts[row] = held;
      counts[rows + row] = fixed;
      finite[row] = all;
    }
    slots[row] = static_cast<int32_t>(place);
  }
}
