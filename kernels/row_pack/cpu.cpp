// Copy the tokens of rows that stay: one memcpy for each run of them, on one thread (a decoding step has few rows).
//
// Tokens are bytes here, of any type. Plain C at the border, so that it compiles in a second or two, without the headers of
// PyTorch.

#include <algorithm>
#include <cstdint>
#include <cstring>

// x [rows, repeats, width] of so many bytes each, keep [rows, width], out [rows, repeats, longest]; the ends are 0. Of a row
// that keeps more than `longest` the first ones are copied.
extern "C" void row_pack(const char* x, const bool* keep, char* out, int64_t bytes, int64_t rows, int64_t repeats,
                         int64_t width, int64_t longest) {
  for (int64_t row = 0; row < rows * repeats; ++row, x += width * bytes) {
    const bool* kept = keep + row / repeats * width;
    char* const end = out + longest * bytes;
    for (int64_t t = 0; t < width;) {
      if (!kept[t]) {
        ++t;
        continue;
      }
      const int64_t first = t;
      while (t < width && kept[t]) ++t;
      const int64_t size = std::min((t - first) * bytes, static_cast<int64_t>(end - out));
      std::memcpy(out, x + first * bytes, size);
      out += size;
    }
    std::memset(out, 0, end - out);
    out = end;
  }
}
