// Numbers, registers and functions that the C++ kernels share.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__AVX2__) || defined(__F16C__)
#include <immintrin.h>
#endif

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

inline float widen(Half x) {
#if defined(__F16C__)
  return _cvtsh_ss(x.bits);
#else  // exact, of subnormal numbers too: the exponent is moved, then rebiased by a product; infinity and NaN stay such
  const uint32_t size = static_cast<uint32_t>(x.bits & 0x7fff) << 13;
  const float wide = (x.bits & 0x7c00) == 0x7c00 ? as_float(size | 0x7f800000) : as_float(size) * 0x1p112f;
  return x.bits & 0x8000 ? -wide : wide;
#endif
}

// Numbers of float16 at any address.
template <int COUNT>
inline void widen_some(const char* x, float* out) {
#if defined(__F16C__)
  __m128i halves = _mm_setzero_si128();
  std::memcpy(&halves, x, 2 * COUNT);
  const __m128 wide = _mm_cvtph_ps(halves);
  std::memcpy(out, &wide, 4 * COUNT);
#else
  Half halves[COUNT];
  std::memcpy(halves, x, sizeof halves);
  for (int i = 0; i < COUNT; ++i) out[i] = widen(halves[i]);
#endif
}

inline void narrow(float x, float* out) { *out = x; }

// To the nearest, ties to even; NaN stays NaN.
inline void narrow(float x, BFloat16* out) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  out->bits = x != x ? 0x7fc0 : static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// To the nearest, ties to even, of a number that is not beyond the type; NaN stays NaN.
inline void narrow(float x, Half* out) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  const uint32_t sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
  const uint32_t normal = (size + 0xfff + (size >> 13 & 1) - (112 << 23)) >> 13;
  const uint32_t subnormal = static_cast<uint32_t>(std::nearbyint(as_float(size) * 0x1p24f));  // below 2^-14
  out->bits = x != x ? 0x7e00 : static_cast<uint16_t>(sign | (size < 113 << 23 ? subnormal : normal));
}

// e^x for x <= 0, relative error below 1e-6: 2^n times a polynomial on [-log(2)/2, log(2)/2]. Below -87, where numbers
// become subnormal, it is 0.
__attribute__((always_inline)) inline float exp_negative(float x) {
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
typedef int32_t LaneInts __attribute__((vector_size(4 * LANES)));
typedef float Four __attribute__((vector_size(16)));
typedef int32_t FourInts __attribute__((vector_size(16)));
#if defined(__clang__)
#define SHUFFLED(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLED(a, b, ...) __builtin_shuffle(a, b, FourInts{__VA_ARGS__})
#endif

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

// `widen` of LANES numbers.
inline Lanes load(const BFloat16* x) { return reinterpret_cast<Lanes>(lane_bits(x) << 16); }

inline Lanes load(const Half* x) {
  const LaneBits bits = lane_bits(x);
  const Lanes size = reinterpret_cast<Lanes>((bits & 0x7fff) << 13) * 0x1p112f;
  const LaneBits beyond = reinterpret_cast<LaneBits>((bits & 0x7c00) == 0x7c00) & 0x7f800000;  // infinity and NaN
  return reinterpret_cast<Lanes>(reinterpret_cast<LaneBits>(size) | beyond | (bits & 0x8000) << 16);
}

// The same lanes, kept in a register: compilers would load them again for each product.
inline Lanes held(Lanes x) {
#if defined(__AVX512F__)
  asm("" : "+v"(x));
#endif
  return x;
}

inline void store(float* x, Lanes lanes) { std::memcpy(x, &lanes, sizeof lanes); }

// LANES bytes as integers, by intrinsics, because compilers split such a conversion.
inline LaneInts lane_bytes(const uint8_t* x) {
#if defined(__AVX512F__)
  return reinterpret_cast<LaneInts>(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x))));
#elif defined(__AVX2__)
  return reinterpret_cast<LaneInts>(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(x))));
#else
  LaneInts lanes;
  for (int i = 0; i < LANES; ++i) lanes[i] = x[i];
  return lanes;
#endif
}

// Of numbers side by side, the four that are left when halves are added.
template <int WIDTH>
inline Four four(const void* x) {
  if constexpr (WIDTH == 4) {
    Four last;
    std::memcpy(&last, x, sizeof last);
    return last;
  } else {
    typedef float Side __attribute__((vector_size(2 * WIDTH)));
    Side halves[2];
    std::memcpy(halves, x, sizeof halves);
    halves[0] += halves[1];
    return four<WIDTH / 2>(halves);
  }
}

inline float total(Lanes lanes) {
  const Four x = four<LANES>(&lanes);
  return (x[0] + x[2]) + (x[1] + x[3]);
}

// `total` of each of four.
inline Four totals(const Lanes (&x)[4]) {
  const Four a = four<LANES>(&x[0]), b = four<LANES>(&x[1]), c = four<LANES>(&x[2]), d = four<LANES>(&x[3]);
  const Four ab = SHUFFLED(a, b, 0, 4, 1, 5) + SHUFFLED(a, b, 2, 6, 3, 7);
  const Four cd = SHUFFLED(c, d, 0, 4, 1, 5) + SHUFFLED(c, d, 2, 6, 3, 7);
  return SHUFFLED(ab, cd, 0, 1, 4, 5) + SHUFFLED(ab, cd, 2, 3, 6, 7);
}

// Prefetch memory.
inline void fetch(const void* p, int64_t bytes) {
  for (int64_t b = 0; b < bytes; b += 64) __builtin_prefetch(static_cast<const char*>(p) + b);
}
