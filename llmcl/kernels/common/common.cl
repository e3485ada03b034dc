// Shared by all kernels: storage types and conversion to float32, epilogue names, exact helpers.
//
// A build constant names the storage type (WEIGHT, KV = f32 | f16 | bf16 | q8_0 ...); arithmetic is float32 everywhere. Weights and
// keys lie in tiles with 16 rows: [rows/16][columns][16]. 16 lanes read 16 consecutive values, and sums over a row need no
// horizontal addition. A step's position and length are in the buffer `state`.

#define CAT_(a, b) a##b
#define CAT(a, b) CAT_(a, b)
#define MAX(a, b) ((a) > (b) ? (a) : (b))  // numbers, or vectors element by element
// A sum of squares, or NaN after an overflow: otherwise a norm with inputs beyond 1e19 would return zeros that look like results.
#define NO_OVERFLOW(sum) (isinf(sum) ? NAN : (sum))
#define IN_REGISTERS __attribute__((always_inline))  // for functions that pass on arrays that must stay in registers

typedef float f32_t;
typedef ushort f16_t;   // half without cl_khr_fp16: storage only, read with the core function vload_half
typedef ushort bf16_t;  // the upper half of a float32
typedef uint bf16x2_t;  // two values
typedef uchar q8_0_t;   // blocks: see tiles.cl for weights, kv_cache.cl for keys and values

inline float load1_f32(__global const f32_t* p) { return *p; }
inline float load1_f16(__global const f16_t* p) { return vload_half(0, (__global const half*)p); }
inline float load1_bf16(__global const bf16_t* p) { return as_float((uint)*p << 16); }

inline float local1_f32(__local const f32_t* p) { return *p; }
inline float local1_f16(__local const f16_t* p) { return vload_half(0, (__local const half*)p); }
inline float local1_bf16(__local const bf16_t* p) { return as_float((uint)*p << 16); }

// 16 values at a time: the vector width of the CPU variants, and a whole row of a tile. Addresses are multiples of 16 elements, so
// plain pointers work. No 16-wide value ever crosses a call into the driver's library: on processors unknown to PoCL's LLVM, the
// two sides disagree about how to pass a 16-wide value.
#ifdef __has_builtin
#if __has_builtin(__builtin_convertvector)
#define WIDEN16(v) __builtin_convertvector(v, uint16)
#define CONVERT16(v, type) __builtin_convertvector(v, CAT(type, 16))
#endif
#endif

inline float16 load16_f32(__global const f32_t* p) { return *(__global const float16*)p; }
#if defined(cl_khr_fp16)
inline float16 load16_f16(__global const f16_t* p) { return vload_half16(0, (__global const half*)p); }
inline void store16_f16(float16 v, __global f16_t* p) { vstore_half16_rte(v, 0, (__global half*)p); }
#elif defined(__x86_64__) && defined(WIDEN16)
// clang's storage type for half, if the processor can convert but the extension is not offered (PoCL).
typedef __fp16 half16_storage __attribute__((ext_vector_type(16)));
inline float16 load16_f16(__global const f16_t* p) {
    return __builtin_convertvector(*(__global const half16_storage*)p, float16);
}
inline void store16_f16(float16 v, __global f16_t* p) {
    *(__global half16_storage*)p = __builtin_convertvector(v, half16_storage);
}
#else
inline float16 load16_f16(__global const f16_t* p) {
    return (float16)(vload_half8(0, (__global const half*)p), vload_half8(1, (__global const half*)p));
}
inline void store16_f16(float16 v, __global f16_t* p) {
    vstore_half8_rte(v.lo, 0, (__global half*)p);
    vstore_half8_rte(v.hi, 1, (__global half*)p);
}
#endif

#ifndef CONVERT16
#define CONVERT16(v, type) ((CAT(type, 16))(CAT(convert_, CAT(type, 8))((v).lo), CAT(convert_, CAT(type, 8))((v).hi)))
#endif
#ifndef WIDEN16
#define WIDEN16(v) ((uint16)(convert_uint8((v).lo), convert_uint8((v).hi)))
#endif
inline float16 load16_bf16(__global const bf16_t* p) { return as_float16(WIDEN16(*(__global const ushort16*)p) << 16); }

inline void store16_f32(float16 v, __global f32_t* p) { *(__global float16*)p = v; }

// exp(x) = 2^n exp(r), |r| <= ln(2) / 2, exp(r) by the Taylor polynomial of degree 6. Relative error below 3e-7; 0 below -87.3,
// infinity above 88.72, NaN for NaN. Only operators, to keep 16 values in a register.
inline float16 exp16(float16 x) {
    float16 z = x < -87.3f ? (float16)(-87.3f) : x;
    z = z > 88.72f ? (float16)(88.72f) : z;
    const float16 shifted = z * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: the sum's low bits are the rounded product
    const float16 n = shifted - 12582912.0f;
    const float16 r = (z - n * 0.693145752f) - n * 1.42860677e-6f;
    float16 p = r * 1.38888889e-3f + 8.33333333e-3f;
    p = p * r + 4.16666667e-2f;
    p = p * r + 1.66666667e-1f;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    p = as_float16(as_int16(p) + (as_int16(shifted) << 23));
    p = x < -87.3f ? (float16)(0.0f) : p;
    return x > 88.72f ? (float16)(INFINITY) : p;
}
// exp2(x) for x < 127, for the softmax: 2^n 2^r, |r| <= 1/2, 2^r by a minimax polynomial; exactly 0 below -126.5, NaN for NaN. The
// relative error is below 2e-7. exp2_short16's is below 8e-5, for results that are rounded to bfloat16 (2e-3).
#define DEFINE_EXP2(name, POLYNOMIAL)                                                                                  \
    inline float16 name(float16 x) {                                                                                   \
        const float16 z = x < -127.0f ? (float16)(-127.0f) : x;                                                        \
        const float16 shifted = z + 12583039.0f; /* 1.5 * 2^23 + 127: its low bits are n and a float's exponent bias */ \
        const float16 r = z - (shifted - 12583039.0f);                                                                 \
        return POLYNOMIAL(r) * as_float16(as_int16(shifted) << 23);                                                    \
    }
#define POLYNOMIAL_3(r) (((r * 5.51716695e-2f + 2.42611125e-1f) * r + 6.93260986e-1f) * r + 9.99928073e-1f)
#define POLYNOMIAL_5(r) \
    (((((r * 1.32647238e-3f + 9.67151299e-3f) * r + 5.55073358e-2f) * r + 2.40222424e-1f) * r + 6.93147004e-1f) * r + 1.0f)
DEFINE_EXP2(exp2_below16, POLYNOMIAL_5)
DEFINE_EXP2(exp2_short16, POLYNOMIAL_3)

// tanh(x) as a minimax quotient of polynomials in x^2, for |x| < 7.9 and constant beyond. Relative error below 1e-6 (5.4e-7 at
// infinity), NaN for NaN.
#define DEFINE_TANH(name, type)               \
    inline type name(type x) {                \
        type z = x < -7.9f ? (type)(-7.9f) : x; \
        z = z > 7.9f ? (type)(7.9f) : z;      \
        const type y = z * z;                 \
        type p = y * -6.26374064e-9f + 7.2293974e-6f; \
        p = p * y + 2.7052525e-3f;            \
        p = p * y + 0.127209723f;             \
        p = p * y + 0.999999821f;             \
        type q = y * 1.97884787e-4f + 2.28878651e-2f; \
        q = q * y + 0.460541487f;             \
        q = q * y + 1.0f;                     \
        return z * p / q;                     \
    }
DEFINE_TANH(tanh1, float)
DEFINE_TANH(tanh16, float16)
#define TANH tanh1  // tanh in user functions: the library's tanh takes several times as long on a GPU
#define FLOAT_OF(x) ((float)(x))  // int to float in user functions
inline float16 max16(float16 a, float16 b) { return a > b ? a : b; }

// Rounds to nearest even; NaN keeps a quiet bit and never rounds to infinity.
inline ushort round_bf16(float x) {
    const uint u = as_uint(x);
    return isnan(x) ? (ushort)((u >> 16) | 0x40u) : (ushort)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

// Rounds 16 numbers; the result is in the upper halves.
inline uint16 round16_bf16(float16 v) {
    const uint16 u = as_uint16(v);
    return v == v ? u + 0x7fffu + (u >> 16 & 1u) : u | 0x400000u;
}

inline void store16_bf16(float16 v, __global bf16_t* p) {
    *(__global ushort16*)p = CONVERT16(round16_bf16(v) >> 16, ushort);
}

inline void store1_f32(float x, __global f32_t* p) { *p = x; }
inline void store1_f16(float x, __global f16_t* p) { vstore_half_rte(x, 0, (__global half*)p); }
inline void store1_bf16(float x, __global bf16_t* p) { *p = round_bf16(x); }

inline float sum16(float16 v) {
    const float8 a = v.lo + v.hi;
    const float4 b = a.lo + a.hi;
    const float2 c = b.lo + b.hi;
    return c.x + c.y;
}

#define EPILOGUE_STORE 0
#define EPILOGUE_ADD 1
#define EPILOGUE_SWIGLU 2  // gate(g) up; GATE selects the gate

// The gate in EPILOGUE_SWIGLU, for vectors of any width and a matching exponential: g sigmoid(z) with z = g (SiLU), or
// z = 2 sqrt(2/pi) (g + 0.044715 g^3), the tanh approximation of GELU (Hendrycks and Gimpel, 2016).
#define GATE_SILU 0
#define GATE_GELU_TANH 1
#define GATE_MINUS_Z(g) (GATE == GATE_GELU_TANH ? -1.5957691216f * (g) * (1.0f + 0.044715f * (g) * (g)) : -(g))
#define GATE_VALUE(g, EXP) ((g) / (1.0f + EXP(GATE_MINUS_Z(g))))

// The activation of MLPs and experts without a gate: GATE_RELU2 has an up projection alone.
#define GATE_RELU2 3
#define SQUARED_RELU(u, type) (AT_LEAST(u, 0.0f, type) * AT_LEAST(u, 0.0f, type))

// Applies an expert's gate to gate g and up u: GATE_VALUE(g) u, or clamped as in gpt-oss,
// g' sigmoid(1.702 g') (u' + 1) with g' = min(g, 7) and u' from -7 to 7.
#define GATE_CLAMPED_SWIGLU 2
#define AT_MOST(v, top, type) ((v) > (top) ? (type)(top) : (v))
#define AT_LEAST(v, low, type) ((v) < (low) ? (type)(low) : (v))
#define CLAMPED_GATE(g, EXP) ((g) / (1.0f + EXP(-1.702f * (g))))
#define APPLY_GATE(g, u, EXP, type)                                                                                     \
    (GATE == GATE_CLAMPED_SWIGLU                                                                                   \
         ? CLAMPED_GATE(AT_MOST(g, 7.0f, type), EXP) * (AT_LEAST(AT_MOST(u, 7.0f, type), -7.0f, type) + 1.0f) \
         : GATE_VALUE(g, EXP) * (u))
