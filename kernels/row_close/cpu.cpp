// Move the kept tokens of rows together: one memmove for each run of them that has to move.
//
// One thread: where one token of each row goes, which is a decoding step, the runs are two a row. Tokens are bytes here,
// of any type. Plain C at the border, so that it compiles in a second or two, without the headers of PyTorch.

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace {

constexpr int COLUMNS = 4;

struct Buffers {
  char* data[COLUMNS];
  int64_t bytes[COLUMNS];  // of one token; 0: there is no such column

  void move(int64_t from, int64_t to, int64_t count) const {
    for (int i = 0; i < COLUMNS; ++i)
      if (bytes[i]) std::memmove(data[i] + to * bytes[i], data[i] + from * bytes[i], count * bytes[i]);
  }
};

void close_down(const Buffers& buffers, const bool* keep, int64_t start, int64_t length) {
  int64_t to = 0;
  for (int64_t t = 0; t < length;) {
    if (!keep[t]) {
      ++t;
      continue;
    }
    const int64_t first = t;
    while (t < length && keep[t]) ++t;
    if (to != first) buffers.move(start + first, start + to, t - first);
    to += t - first;
  }
}

void close_up(const Buffers& buffers, const bool* keep, int64_t start, int64_t length) {
  int64_t to = length;
  for (int64_t t = length; t > 0;) {
    if (!keep[t - 1]) {
      --t;
      continue;
    }
    const int64_t stop = t;
    while (t > 0 && keep[t - 1]) --t;
    to -= stop - t;
    if (to != t) buffers.move(start + t, start + to, stop - t);
  }
}

}  // namespace

// a to d: buffers whose tokens have so many bytes, or null and 0; starts, lengths [rows], keep [rows, width]; side: 0 rows
// begin where they began, 1 they end where they ended, -1 the one where fewer tokens have to move, which is written there.
extern "C" void row_close(char* a, char* b, char* c, char* d, const int64_t* starts, const int64_t* lengths,
                          const bool* keep, int64_t bytes_a, int64_t bytes_b, int64_t bytes_c, int64_t bytes_d,
                          int64_t rows, int64_t width, int64_t* side) {
  const Buffers buffers{{a, b, c, d}, {bytes_a, bytes_b, bytes_c, bytes_d}};
  if (*side < 0) {
    int64_t down = 0, up = 0;
    for (int64_t row = 0; row < rows; ++row) {
      const bool* kept = keep + row * width;
      const int64_t length = std::min(lengths[row], width);
      int64_t first = 0, last = length;
      while (first < length && kept[first]) ++first;
      while (last > 0 && kept[last - 1]) --last;
      for (int64_t t = first; t < length; ++t) down += kept[t];
      for (int64_t t = 0; t < last; ++t) up += kept[t];
    }
    *side = up < down;
  }
  for (int64_t row = 0; row < rows; ++row) {
    const auto close = *side ? close_up : close_down;
    close(buffers, keep + row * width, starts[row], std::min(lengths[row], width));
  }
}
