// out = x W^T + b for the states of a few tokens: a memory-bound pass over the rows of W, which the threads share.
//
// A thread reads its rows in the order of memory and prefetches. In bfloat16, processors with AMX multiply ROWS rows with
// up to TOKENS tokens at once. Elsewhere SIDE_BY_SIDE tokens are multiplied with a row at once, and further ones find
// the row in the cache. One thread sums a row in a fixed order, so that the number of threads changes no result.

#include <algorithm>
#include <cstdint>
#include <vector>

#if defined(__AMX_BF16__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "native.h"

namespace {

constexpr int64_t PARALLEL = 1 << 15;              // least number of weights for which several threads start
constexpr int64_t AHEAD = 4096;                    // bytes
constexpr int SUMS = 4;                            // independent registers of a token
constexpr int SIDE_BY_SIDE = LANES == 16 ? 6 : 3;  // tokens whose sums fit into the registers
constexpr int64_t TOKENS = 16, ROWS = 32, DEPTH = 32;  // of a step with AMX: tokens, rows, numbers of a row
constexpr int64_t FEW = 3;                             // tokens below which a row after the other is faster

// Arrays x [tokens, in], weight [out, in], bias [out] or null, and out [tokens, out].
template <typename T>
struct Product {
  const T *x, *weight, *bias;
  int64_t tokens, rows, size;
  T* out;

  void put(int64_t token, int64_t row, float sum) const {
    narrow(sum + (bias ? widen(bias[row]) : 0.0f), out + token * rows + row);
  }
};

// ---- a row after the other

// sums[m] = <x_m, row> of COUNT tokens. `fetches`: the bytes ahead are prefetched.
template <int COUNT, typename T>
void dot(const float* x, const T* row, int64_t size, bool fetches, float* sums) {
  Lanes parts[COUNT][SUMS] = {};
  int64_t i = 0;
  for (; i + SUMS * LANES <= size; i += SUMS * LANES) {
    if (fetches) fetch(reinterpret_cast<const char*>(row + i) + AHEAD, SUMS * LANES * sizeof(T));
    for (int n = 0; n < SUMS; ++n) {
      const Lanes weights = held(load(row + i + n * LANES));
      for (int m = 0; m < COUNT; ++m) parts[m][n] += load(x + m * size + i + n * LANES) * weights;
    }
  }
  for (int m = 0; m < COUNT; ++m) {
    const float* states = x + m * size;
    Lanes all = (parts[m][0] + parts[m][1]) + (parts[m][2] + parts[m][3]);
    int64_t j = i;
    for (; j + LANES <= size; j += LANES) all += load(states + j) * load(row + j);
    sums[m] = total(all);
    for (; j < size; ++j) sums[m] += states[j] * widen(row[j]);
  }
}

template <int COUNT = SIDE_BY_SIDE, typename T>
void dots(int64_t count, const float* x, const T* row, int64_t size, bool fetches, float* sums) {
  if (COUNT == 1 || count == COUNT) dot<COUNT>(x, row, size, fetches, sums);
  else if constexpr (COUNT > 1) dots<COUNT - 1>(count, x, row, size, fetches, sums);
}

template <typename T>
void by_row(const Product<T>& p, int64_t first, int64_t threads) {
  std::vector<float> x(p.tokens * p.size);
  for (int64_t i = 0; i < p.tokens * p.size; ++i) x[i] = widen(p.x[i]);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && (p.rows - first) * p.size >= PARALLEL)
  for (int64_t row = first; row < p.rows; ++row)
    for (int64_t token = 0; token < p.tokens; token += SIDE_BY_SIDE) {
      const int64_t some = std::min<int64_t>(SIDE_BY_SIDE, p.tokens - token);
      float sums[SIDE_BY_SIDE];
      dots(some, x.data() + token * p.size, p.weight + row * p.size, p.size, token == 0, sums);
      for (int64_t m = 0; m < some; ++m) p.put(token + m, row, sums[m]);
    }
}

// ---- ROWS rows and TOKENS tokens at once

#if defined(__AMX_BF16__) && defined(__linux__)

// Whether this process may use tiles, which Linux grants on request.
bool has_tiles() {
  static const bool granted = syscall(SYS_arch_prctl, 0x1023, 18) == 0;  // ARCH_REQ_XCOMP_PERM, XTILEDATA
  return granted;
}

// Tiles of 16 rows of 64 bytes while it lives; then those that were there before, as another library expects.
struct Tiles {
  alignas(64) uint8_t old[64] = {};
  Tiles() {
    alignas(64) uint8_t wanted[64] = {1};  // the palette; from byte 16 on the bytes of a row, from 48 on the rows
    for (int tile = 0; tile < 8; ++tile) {
      wanted[16 + 2 * tile] = 64;
      wanted[48 + tile] = 16;
    }
    _tile_storeconfig(old);
    _tile_loadconfig(wanted);
  }
  ~Tiles() {
    if (old[0]) _tile_loadconfig(old);
    else _tile_release();
  }
};

// sums [ROWS, TOKENS] of weights [ROWS, size]; x [size / 2, TOKENS, 2]. The weights behind these are prefetched.
void by_tile(const BFloat16* weights, const BFloat16* x, int64_t size, float* sums) {
  const int64_t stride = 2 * size, next = ROWS * stride;
  asm volatile("" ::: "memory");  // the loads below do not say that they read memory
  _tile_zero(0);
  _tile_zero(1);
  for (int64_t i = 0; i < size; i += DEPTH) {
    const char* here = reinterpret_cast<const char*>(weights + i);
    fetch(reinterpret_cast<const char*>(weights) + next + 2 * ROWS * i, 2 * ROWS * DEPTH);
    _tile_loadd(7, x + i * TOKENS, 64);
    _tile_loadd(4, here, stride);
    _tile_dpbf16ps(0, 4, 7);
    _tile_loadd(5, here + 16 * stride, stride);
    _tile_dpbf16ps(1, 5, 7);
  }
  _tile_stored(0, sums, 64);
  _tile_stored(1, sums + 256, 64);
}

// Compute the rows that fill steps, and return their number.
int64_t by_tiles(const Product<BFloat16>& p, int64_t threads) {
  const int64_t steps = p.rows / ROWS;
  if (p.tokens < FEW || p.size % DEPTH || steps == 0 || !has_tiles()) return 0;
  std::vector<BFloat16> x(p.size * TOKENS);
  for (int64_t first = 0; first < p.tokens; first += TOKENS) {
    const int64_t some = std::min(TOKENS, p.tokens - first);
    for (int64_t i = 0; i < p.size; ++i)
      for (int64_t m = 0; m < some; ++m) x[(i / 2 * TOKENS + m) * 2 + i % 2] = p.x[(first + m) * p.size + i];
#pragma omp parallel num_threads(threads) if (threads > 1 && p.rows * p.size >= PARALLEL)
    {
      const Tiles tiles;
      alignas(64) float sums[ROWS * TOKENS];
#pragma omp for schedule(static)
      for (int64_t step = 0; step < steps; ++step) {
        by_tile(p.weight + step * ROWS * p.size, x.data(), p.size, sums);
        for (int64_t m = 0; m < some; ++m)
          for (int64_t row = 0; row < ROWS; ++row) p.put(first + m, step * ROWS + row, sums[row * TOKENS + m]);
      }
    }
  }
  return steps * ROWS;
}

#else

int64_t by_tiles(const Product<BFloat16>&, int64_t) { return 0; }

#endif

int64_t by_tiles(const Product<float>&, int64_t) { return 0; }

}  // namespace

// All arrays are of a type (0 float32, 1 bfloat16) and contiguous; see Product.
extern "C" void linear(int64_t type, const void* x, const void* weight, const void* bias, int64_t tokens, int64_t rows,
                       int64_t size, int64_t threads, void* out) {
  const auto run = [&](auto kind) {
    using T = decltype(kind);
    const Product<T> product = {static_cast<const T*>(x), static_cast<const T*>(weight), static_cast<const T*>(bias),
                                tokens, rows, size, static_cast<T*>(out)};
    const int64_t done = by_tiles(product, threads);
    if (done < rows) by_row(product, done, threads);
  };
  if (type == 0) run(float());
  if (type == 1) run(BFloat16());
}
