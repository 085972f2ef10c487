// New tokens into rows that lie in blocks: one copy of each token, or its codes.
//
// Plain C at the border, so that it compiles in a second or two, without the headers of PyTorch.

#include <cstdint>
#include <cstring>
#include <vector>

#include "encode.h"
#include "pages.h"

namespace {

// One token `fresh` into place `at` of a column; `room` holds its numbers in float32 while codes are made of them.
void put(const Column& c, const char* fresh, int64_t at, std::vector<float>& room) {
  char* token = c.data + at * c.bytes;
  if (!c.coded) {  // of any type
    std::memcpy(token, fresh, c.bytes);
    return;
  }
  room.resize(c.width);
  widen_all(c.type, fresh, c.width, room.data());
  encode(c, room.data(), token);
}

}  // namespace

// k, v [B, heads, T, ...] with strides in bytes (three of k, three of v), contiguous in the last dimension; said [B,
// heads, T] of `gate_bytes` each, or null where the gate column, if there is one, gets 1; ranks [B, T], below 0 where a
// token is not written. gate_float: whether a gate column holds float32, else bytes.
extern "C" void kv_append(const Pages* into, char* gate, int64_t gate_bytes, const char* k, const char* v,
                          const int64_t* strides, const char* said, const int64_t* ranks, int64_t heads, int64_t tokens,
                          int64_t threads, int64_t gate_float) {
  const Pages& pages = *into;
  const int64_t some = pages.rows * tokens < 1024 ? 1 : threads;  // starting threads costs more than few copies
#pragma omp parallel for num_threads(some) schedule(static)
  for (int64_t row = 0; row < pages.rows; ++row) {
    std::vector<float> room;
    const int64_t b = row / heads, h = row % heads;
    int64_t length = pages.lengths[row];
    for (int64_t t = 0; t < tokens; ++t) {
      const int64_t rank = ranks[b * tokens + t];
      if (rank < 0) continue;
      const int64_t at = pages.part(row, length, length + 1, 0).start;
      put(pages.keys, k + b * strides[0] + h * strides[1] + t * strides[2], at, room);
      put(pages.values, v + b * strides[3] + h * strides[4] + t * strides[5], at, room);
      pages.ranks[at] = static_cast<int32_t>(rank);
      if (gate && said) {
        std::memcpy(gate + at * gate_bytes, said + (row * tokens + t) * gate_bytes, gate_bytes);
      } else if (gate && gate_float) {
        const float one = 1;
        std::memcpy(gate + at * gate_bytes, &one, sizeof one);
      } else if (gate) {
        gate[at] = 1;
      }
      ++length;
    }
    pages.lengths[row] = static_cast<int32_t>(length);
  }
}
