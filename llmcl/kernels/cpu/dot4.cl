// add4(sum, pairs, w, x, j, n): adds to each of 16 int lanes its 4 bytes of w times the 4 signed bytes of x; vector j of n.
// DOT: 1  vpdpbusd (AVX-512 VNNI) as LLVM's intrinsic, called by name; 2, 3  in inline assembly, 512 and 2 x 256 bits;
//      4  the same with 256 bits where there is no AVX-512 (AVX-VNNI); 5  vpmaddubsw and vpmaddwd (AVX2), as intrinsics.
//
// With AVX2 pairs of products are added in 16 bits over DOT_CHUNK vectors w, then to sum, the last at vector n - 1. The 16 bits
// hold 2 DOT_CHUNK products of at most DOT_LARGEST times 127. Bytes up to 255 are numbers plus 128, and the sums are those of
// the signed numbers then (DOT_IS_SIGNED); else of the unsigned bytes.
//
// Build: DOT. Before: DOT_LARGEST, the largest byte of w.
#if !defined(DOT) || !defined(DOT_LARGEST)
#error "cpu/dot4.cl needs DOT, DOT_LARGEST"
#endif
#define DOT_IS_SIGNED (DOT >= 5 && DOT_LARGEST > 127)
#define DOT_CHUNK (DOT < 5 || DOT_LARGEST > 63 ? 1 : DOT_LARGEST > 31 ? 2 : DOT_LARGEST > 15 ? 4 : 8)

typedef short short32 __attribute__((ext_vector_type(32)));

#if DOT >= 5
typedef char char32 __attribute__((ext_vector_type(32)));
short16 vpmaddubsw(char32 a, char32 b) __asm("llvm.x86.avx2.pmadd.ub.sw");
int8 vpmaddwd(short16 a, short16 b) __asm("llvm.x86.avx2.pmadd.wd");
char32 vpsignb(char32 a, char32 b) __asm("llvm.x86.avx2.psign.b");
inline short16 multiply_pairs(const uint8 w, const int x) {
    const char32 xs = __builtin_astype((int8)(x), char32);
#if DOT_IS_SIGNED
    const char32 numbers = __builtin_astype(w ^ 0x80808080u, char32);
    return vpmaddubsw(vpsignb(numbers, numbers), vpsignb(xs, numbers));
#else
    return vpmaddubsw(__builtin_astype(w, char32), xs);
#endif
}
inline void add4(int16* sum, short32* pairs, const uint16 w, const int x, const int j, const int n) {
    const short16 lo = multiply_pairs(w.lo, x), hi = multiply_pairs(w.hi, x);
    const bool first = j % DOT_CHUNK == 0;
    pairs->lo = first ? lo : pairs->lo + lo;
    pairs->hi = first ? hi : pairs->hi + hi;
    if (j == n - 1 || j % DOT_CHUNK == DOT_CHUNK - 1) *sum += (int16)(vpmaddwd(pairs->lo, (short16)(1)), vpmaddwd(pairs->hi, (short16)(1)));
}
#else
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
#else
inline int8 dot4_half(int8 sum, uint8 w, int8 x) {
#if DOT == 3
    __asm("vpdpbusd %2,%1,%0" : "+x"(sum) : "x"(w), "x"(x));
#else
    __asm("{vex} vpdpbusd %2,%1,%0" : "+x"(sum) : "x"(w), "x"(x));
#endif
    return sum;
}
inline int16 dot4(int16 sum, uint16 w, int x) {
    const int8 xs = (int8)(x);
    return (int16)(dot4_half(sum.lo, w.lo, xs), dot4_half(sum.hi, w.hi, xs));
}
#endif
inline void add4(int16* sum, short32* pairs, const uint16 w, const int x, const int j, const int n) {
    *sum = dot4(*sum, w, x);
}
#endif
