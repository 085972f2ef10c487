// What the C++ kernels share.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

inline float as_float(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

struct BFloat16 {
  uint16_t bits;
};

struct Half {
  uint16_t bits;
};

inline float widen(float x) { return x; }

inline float widen(BFloat16 x) { return as_float(static_cast<uint32_t>(x.bits) << 16); }

// Exact for finite numbers, subnormal ones among them: the exponent is moved, then rebiased by a product.
inline float widen(Half x) {
  const float size = as_float(static_cast<uint32_t>(x.bits & 0x7fff) << 13) * 0x1p112f;
  return x.bits & 0x8000 ? -size : size;
}

inline void narrow(float x, float* out) { *out = x; }

// To the nearest, ties to even; NaN stays NaN.
inline void narrow(float x, BFloat16* out) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  out->bits = x != x ? 0x7fc0 : static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// e^x for x <= 0, relative error below 1e-6: 2^n times a polynomial on [-log(2)/2, log(2)/2]. Below -87, where numbers
// become subnormal, it is 0.
inline float exp_negative(float x) {
  const float n = std::nearbyint((x > -87.0f ? x : -87.0f) * 1.44269504f);  // of NaN too, for the cast below
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.0f / 5040;
  p = p * r + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  return x < -87.0f ? 0.0f : p * as_float(static_cast<uint32_t>(static_cast<int32_t>(n) + 127) << 23);
}

// Numbers side by side, as many as a register holds.
#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif
typedef float Lanes __attribute__((vector_size(4 * LANES)));
typedef uint32_t LaneBits __attribute__((vector_size(4 * LANES)));
typedef uint16_t LaneHalves __attribute__((vector_size(2 * LANES)));

inline LaneBits lane_bits(const void* x) {
  LaneHalves bits;
  std::memcpy(&bits, x, sizeof bits);
  return __builtin_convertvector(bits, LaneBits);
}

inline Lanes load(const float* x) {
  Lanes lanes;
  std::memcpy(&lanes, x, sizeof lanes);
  return lanes;
}

// What `widen` does, of each.
inline Lanes load(const BFloat16* x) { return reinterpret_cast<Lanes>(lane_bits(x) << 16); }

inline Lanes load(const Half* x) {
  const LaneBits bits = lane_bits(x);
  const Lanes size = reinterpret_cast<Lanes>((bits & 0x7fff) << 13) * 0x1p112f;
  return reinterpret_cast<Lanes>(reinterpret_cast<LaneBits>(size) | (bits & 0x8000) << 16);
}

inline void store(float* x, Lanes lanes) { std::memcpy(x, &lanes, sizeof lanes); }

// The sum of `WIDTH` numbers, halves added until four are left.
template <int WIDTH>
inline float total(const void* x) {
  if constexpr (WIDTH == 4) {
    float four[4];
    std::memcpy(four, x, sizeof four);
    return (four[0] + four[2]) + (four[1] + four[3]);
  } else {
    typedef float Part __attribute__((vector_size(2 * WIDTH)));
    Part halves[2];
    std::memcpy(halves, x, sizeof halves);
    halves[0] += halves[1];
    return total<WIDTH / 2>(halves);
  }
}

inline float total(Lanes lanes) { return total<LANES>(&lanes); }

// Ask for memory that is read soon.
inline void fetch(const void* p, int64_t bytes) {
  for (int64_t b = 0; b < bytes; b += 64) __builtin_prefetch(static_cast<const char*>(p) + b);
}

// Call work(T()) for a type: 0 float32, 1 bfloat16, 2 float16.
template <typename Work>
void by_type(int64_t type, const Work& work) {
  if (type == 0) work(float());
  if (type == 1) work(BFloat16());
  if (type == 2) work(Half());
}

// Tokens of one page: [start, start + count) of the pool are slots from `offset` on of what is worked on at once.
struct Part {
  int64_t start, count, offset;
};

constexpr int BLOCKS = LANES == 8 ? 2 : 4;  // registers of one query's output that fit beside those of three others

// out[n][...] += sum_t weights[n * QUERY + t * TOKEN] v_t[...], of N queries and B registers of numbers.
template <int N, int64_t QUERY, int64_t TOKEN, int B, typename T>
static void mix_block(const float* weights, const T* values, int64_t count, int64_t width, float* out, const T* next) {
  Lanes mixed[N][B];
  for (int n = 0; n < N; ++n)
    for (int b = 0; b < B; ++b) mixed[n][b] = load(out + n * width + b * LANES);
  for (int64_t t = 0; t < count; ++t) {
    if (next) fetch(next + t * width, B * LANES * sizeof(T));
    for (int b = 0; b < B; ++b) {
      const Lanes v = load(values + t * width + b * LANES);
      for (int n = 0; n < N; ++n) mixed[n][b] += weights[n * QUERY + t * TOKEN] * v;
    }
  }
  for (int n = 0; n < N; ++n)
    for (int b = 0; b < B; ++b) store(out + n * width + b * LANES, mixed[n][b]);
}

// The same of all numbers; meanwhile the page `next` is fetched, where there is one.
template <int N, int64_t QUERY, int64_t TOKEN, typename T>
static void mix(const float* weights, const T* values, int64_t count, int64_t width, float* out,
                const T* next = nullptr) {
  const auto ahead = [&](int64_t d) { return next ? next + d : next; };
  int64_t d = 0;
  for (; d + BLOCKS * LANES <= width; d += BLOCKS * LANES)
    mix_block<N, QUERY, TOKEN, BLOCKS>(weights, values + d, count, width, out + d, ahead(d));
  for (; d + LANES <= width; d += LANES)
    mix_block<N, QUERY, TOKEN, 1>(weights, values + d, count, width, out + d, ahead(d));
  for (; d < width; ++d)
    for (int n = 0; n < N; ++n)
      for (int64_t t = 0; t < count; ++t)
        out[n * width + d] += weights[n * QUERY + t * TOKEN] * widen(values[t * width + d]);
}
