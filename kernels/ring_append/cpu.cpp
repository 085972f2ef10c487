// One new token per sequence into rows whose newest tokens lie in a ring: a few copies of one token a row.
//
// One thread: what a step copies is smaller than what starting others costs. Keys and values are bytes here, of any type.
// Plain C at the border, so that it compiles in a second or two, without the headers of PyTorch.

#include <cstdint>
#include <cstring>

namespace {

struct Buffers {
  char *keys, *values;
  int32_t* ranks;
  bool* flags;
  int64_t key, value;  // bytes of one token

  void move(int64_t from, int64_t to) const {
    if (from == to) return;  // memcpy takes no overlap
    std::memcpy(keys + to * key, keys + from * key, key);
    std::memcpy(values + to * value, values + from * value, value);
    ranks[to] = ranks[from];
    flags[to] = flags[from];
  }
};

}  // namespace

// keys [S, key bytes], values [S, value bytes], ranks [S], flags [S], starts [R], lengths [R]; new_keys [R, key bytes],
// new_values [R, value bytes], new_flags [R], new_ranks [R / heads], below 0 where there is no new token; window 0: none.
// All contiguous.
extern "C" void ring_append(char* keys, char* values, int32_t* ranks, bool* flags, const int64_t* starts,
                            int64_t* lengths, const char* new_keys, const char* new_values, const bool* new_flags,
                            const int64_t* new_ranks, int64_t rows, int64_t heads, int64_t key, int64_t value,
                            int64_t ring, int64_t window) {
  const Buffers buffers{keys, values, ranks, flags, key, value};
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t rank = new_ranks[row / heads], start = starts[row];
    if (rank < 0) continue;
    int64_t length = lengths[row], place = rank % ring;
    if (place >= length) {
      place = length++;
    } else if (flags[start + place]) {
      buffers.move(start + place, start + length++);
    }
    const int64_t slot = start + place;
    std::memcpy(keys + slot * key, new_keys + row * key, key);
    std::memcpy(values + slot * value, new_values + row * value, value);
    ranks[slot] = static_cast<int32_t>(rank);
    flags[slot] = new_flags[row];
    for (int64_t t = start; window && rank >= window && t < start + length; ++t)
      if (ranks[t] == rank - window) {
        buffers.move(start + --length, t);
        break;
      }
    lengths[row] = length;
  }
}
