// dot2(sum, w, x): adds to each of 16 float lanes its 2 bfloat16 from w times the 2 from x, rounding after each sum;
// numbers below the normal range count as 0.
// narrow16(v): rounds 16 floats to nearest even bfloat16. sum2(sum, w): adds to each of 8 lanes its 2 bfloat16 from w.
// DOT: 1  vdpbf16ps (AVX-512 BF16) as LLVM's intrinsics, reached through their names; 2  in inline assembly, 2 x 256 bits.
#if DOT == 1
typedef __bf16 bf16_32 __attribute__((ext_vector_type(32)));
float16 vdpbf16ps_512(float16 sum, bf16_32 a, bf16_32 b) __asm("llvm.x86.avx512bf16.dpbf16ps.512");
inline float16 dot2(float16 sum, uint16 w, uint x) {
    const uint16 xs = (uint16)(x);
    return vdpbf16ps_512(sum, __builtin_astype(w, bf16_32), __builtin_astype(xs, bf16_32));
}
typedef __bf16 bf16_16 __attribute__((ext_vector_type(16)));
bf16_16 vcvtneps2bf16_512(float16 v) __asm("llvm.x86.avx512bf16.cvtneps2bf16.512");
inline ushort16 narrow16(float16 v) { return __builtin_astype(vcvtneps2bf16_512(v), ushort16); }
float8 vdpbf16ps_256(float8 sum, bf16_16 a, bf16_16 b) __asm("llvm.x86.avx512bf16.dpbf16ps.256");
inline float8 sum2(float8 sum, ushort16 w) {
    return vdpbf16ps_256(sum, __builtin_astype(w, bf16_16), __builtin_astype((ushort16)(0x3f80), bf16_16));
}
#elif DOT == 2
inline float8 dot2_half(float8 sum, uint8 w, uint8 x) {
    __asm("vdpbf16ps %2,%1,%0" : "+x"(sum) : "x"(w), "x"(x));
    return sum;
}
inline float16 dot2(float16 sum, uint16 w, uint x) {
    const uint8 xs = (uint8)(x);
    return (float16)(dot2_half(sum.lo, w.lo, xs), dot2_half(sum.hi, w.hi, xs));
}
inline ushort8 narrow_half(float8 v) {
    ushort8 narrow;
    __asm("vcvtneps2bf16 %1,%0" : "=x"(narrow) : "x"(v));
    return narrow;
}
inline ushort16 narrow16(float16 v) { return (ushort16)(narrow_half(v.lo), narrow_half(v.hi)); }
inline float8 sum2(float8 sum, ushort16 w) { return dot2_half(sum, as_uint8(w), (uint8)(0x3f803f80)); }
#endif
