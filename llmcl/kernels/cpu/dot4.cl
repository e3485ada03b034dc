// dot4(sum, w, x): adds to each of 16 int lanes its 4 unsigned bytes from w times the 4 signed bytes from x.
// DOT: 1  vpdpbusd (AVX-512 VNNI) as LLVM's intrinsic, called by name; 2, 3  in inline assembly, 512 and 2 x 256 bits.
#if DOT == 1
typedef char char64 __attribute__((ext_vector_type(64)));
int16 vpdpbusd_512(int16 sum, char64 a, char64 b) __asm("llvm.x86.avx512.vpdpbusd.512");
inline int16 dot4(int16 sum, uint16 w, int x) {
    const int16 xs = (int16)(x);
    return vpdpbusd_512(sum, __builtin_astype(w, char64), __builtin_astype(xs, char64));
}
#elif DOT == 2
inline int16 dot4(int16 sum, uint16 w, int x) {
    const int16 xs = (int16)(x);
    __asm("vpdpbusd %2,%1,%0" : "+v"(sum) : "v"(w), "v"(xs));
    return sum;
}
#elif DOT == 3
inline int8 dot4_half(int8 sum, uint8 w, int8 x) {
    __asm("vpdpbusd %2,%1,%0" : "+x"(sum) : "x"(w), "x"(x));
    return sum;
}
inline int16 dot4(int16 sum, uint16 w, int x) {
    const int8 xs = (int8)(x);
    return (int16)(dot4_half(sum.lo, w.lo, xs), dot4_half(sum.hi, w.hi, xs));
}
#endif
