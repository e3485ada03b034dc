// dot2(sum, w, x): to each of 16 float lanes the products of its 2 bfloat16 of w with the 2 of x, rounded after each sum;
// numbers below the normal range count as 0.
// DOT: 1  vdpbf16ps (AVX-512 BF16) as LLVM's intrinsic, reached through its name; 2  in inline assembly, 2 x 256 bits.
#if DOT == 1
typedef __bf16 bf16_32 __attribute__((ext_vector_type(32)));
float16 vdpbf16ps_512(float16 sum, bf16_32 a, bf16_32 b) __asm("llvm.x86.avx512bf16.dpbf16ps.512");
inline float16 dot2(float16 sum, uint16 w, uint x) {
    const uint16 xs = (uint16)(x);
    return vdpbf16ps_512(sum, __builtin_astype(w, bf16_32), __builtin_astype(xs, bf16_32));
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
#endif
