// Element types and reduction operations; the host build gives the same bits as the GPU.
//
// Every operation is three functions: `load` turns a rank's own element into its contribution, `reduce` joins two,
// `finish` ends the reduction. Arithmetic runs in wide_t<T>; `narrow` rounds once. Semantics are NCCL's: avg of
// floating types multiplies each input by 1/ranks in the type and sums; avg of integers sums with wrap-around and
// divides toward zero; max drops a NaN when the other operand is a number. Nothing here may be contracted into a
// fused multiply-add (-fmad=false, -ffp-contract=off), or bits would differ between devices.
#pragma once
#include "block.h"
#include <stdint.h>
#include <string.h>
#if defined(__CUDACC__)
#include <cuda_fp16.h>
#endif

namespace ossicle {

OSSICLE_DEVICE float float_of_bits(uint32_t bits) {
#if defined(__CUDACC__)
  return __uint_as_float(bits);
#else
  float value;
  memcpy(&value, &bits, 4);
  return value;
#endif
}

OSSICLE_DEVICE uint32_t bits_of_float(float value) {
#if defined(__CUDACC__)
  return __float_as_uint(value);
#else
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return bits;
#endif
}

// 16-bit floats are carried as their bits.
struct Float16 { uint16_t bits; };
struct Bfloat16 { uint16_t bits; };

OSSICLE_DEVICE float widen(Float16 value) {
#if defined(__CUDACC__)
  return __half2float(__ushort_as_half(value.bits));
#else
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000u) << 16;
  const uint32_t rest = value.bits & 0x7fffu;
  if (rest >= 0x7c00u) return float_of_bits(sign | 0x7f800000u | (rest & 0x3ffu) << 13);
  if (rest < 0x400u) {
    const float subnormal = static_cast<float>(rest) * 0x1p-24f;  // exact, and never a subnormal float
    return float_of_bits(sign | bits_of_float(subnormal));
  }
  return float_of_bits(sign | ((rest << 13) + 0x38000000u));
#endif
}

OSSICLE_DEVICE Float16 narrow_half(float value) {
#if defined(__CUDACC__)
  return Float16{__half_as_ushort(__float2half_rn(value))};
#else
  const uint32_t bits = bits_of_float(value);
  const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000u);
  const uint32_t rest = bits & 0x7fffffffu;
  if (rest > 0x7f800000u) return Float16{0x7fff};  // the GPU's NaN
  if (rest >= 0x477ff000u) return Float16{static_cast<uint16_t>(sign | 0x7c00u)};
  if (rest < 0x38800000u) {
    // Subnormal half: adding 0.5 aligns the last place at 2^-24 and rounds to nearest even.
    const uint32_t rounded = bits_of_float(float_of_bits(rest) + 0.5f) - 0x3f000000u;
    return Float16{static_cast<uint16_t>(sign | rounded)};
  }
  const uint32_t rounded = rest + 0xfffu + (rest >> 13 & 1u);
  return Float16{static_cast<uint16_t>(sign | (rounded - 0x38000000u) >> 13)};
#endif
}

OSSICLE_DEVICE float widen(Bfloat16 value) { return float_of_bits(static_cast<uint32_t>(value.bits) << 16); }

OSSICLE_DEVICE Bfloat16 narrow_bfloat(float value) {
  const uint32_t bits = bits_of_float(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return Bfloat16{0x7fff};
  return Bfloat16{static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16)};
}

template <typename T> struct Wide { using type = T; };
template <> struct Wide<Float16> { using type = float; };
template <> struct Wide<Bfloat16> { using type = float; };
template <typename T> using wide_t = typename Wide<T>::type;

OSSICLE_DEVICE float widen(float value) { return value; }
OSSICLE_DEVICE double widen(double value) { return value; }
OSSICLE_DEVICE int32_t widen(int32_t value) { return value; }
OSSICLE_DEVICE uint8_t widen(uint8_t value) { return value; }

template <typename T> struct Narrow {
  OSSICLE_DEVICE static T from(T value) { return value; }
};
template <> struct Narrow<Float16> {
  OSSICLE_DEVICE static Float16 from(float value) { return narrow_half(value); }
};
template <> struct Narrow<Bfloat16> {
  OSSICLE_DEVICE static Bfloat16 from(float value) { return narrow_bfloat(value); }
};
template <typename T> OSSICLE_DEVICE T narrow(wide_t<T> value) { return Narrow<T>::from(value); }

// Sums wrap in integers without the undefined overflow of signed types.
OSSICLE_DEVICE float add(float a, float b) { return a + b; }
OSSICLE_DEVICE double add(double a, double b) { return a + b; }
OSSICLE_DEVICE uint8_t add(uint8_t a, uint8_t b) { return static_cast<uint8_t>(a + b); }
OSSICLE_DEVICE int32_t add(int32_t a, int32_t b) {
  return static_cast<int32_t>(static_cast<uint32_t>(a) + static_cast<uint32_t>(b));
}

template <typename T> struct Sum {
  OSSICLE_DEVICE explicit Sum(uint32_t) {}
  OSSICLE_DEVICE wide_t<T> load(wide_t<T> value) const { return value; }
  OSSICLE_DEVICE wide_t<T> reduce(wide_t<T> a, wide_t<T> b) const { return add(a, b); }
  OSSICLE_DEVICE wide_t<T> finish(wide_t<T> value) const { return value; }
};

template <typename T> struct Max {
  OSSICLE_DEVICE explicit Max(uint32_t) {}
  OSSICLE_DEVICE wide_t<T> load(wide_t<T> value) const { return value; }
  // a wins unless b is a larger number or a is NaN; the comparison with itself tells NaN.
  OSSICLE_DEVICE wide_t<T> reduce(wide_t<T> a, wide_t<T> b) const { return a >= b || b != b ? a : b; }
  OSSICLE_DEVICE wide_t<T> finish(wide_t<T> value) const { return value; }
};

template <typename T> struct Avg {
  wide_t<T> ranks;
  OSSICLE_DEVICE explicit Avg(uint32_t count) : ranks(static_cast<wide_t<T>>(count)) {}
  OSSICLE_DEVICE wide_t<T> load(wide_t<T> value) const { return value; }
  OSSICLE_DEVICE wide_t<T> reduce(wide_t<T> a, wide_t<T> b) const { return add(a, b); }
  OSSICLE_DEVICE wide_t<T> finish(wide_t<T> value) const { return static_cast<wide_t<T>>(value / ranks); }
};

// Floating average: the factor is rounded to the type, and so is every product.
template <typename T> struct FloatingAvg {
  wide_t<T> factor;
  OSSICLE_DEVICE explicit FloatingAvg(uint32_t count)
      : factor(widen(narrow<T>(static_cast<wide_t<T>>(1) / static_cast<wide_t<T>>(count)))) {}
  OSSICLE_DEVICE wide_t<T> load(wide_t<T> value) const { return widen(narrow<T>(value * factor)); }
  OSSICLE_DEVICE wide_t<T> reduce(wide_t<T> a, wide_t<T> b) const { return add(a, b); }
  OSSICLE_DEVICE wide_t<T> finish(wide_t<T> value) const { return value; }
};
template <> struct Avg<float> : FloatingAvg<float> { using FloatingAvg::FloatingAvg; };
template <> struct Avg<double> : FloatingAvg<double> { using FloatingAvg::FloatingAvg; };
template <> struct Avg<Float16> : FloatingAvg<Float16> { using FloatingAvg::FloatingAvg; };
template <> struct Avg<Bfloat16> : FloatingAvg<Bfloat16> { using FloatingAvg::FloatingAvg; };

}  // namespace ossicle
