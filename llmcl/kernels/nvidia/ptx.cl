// NVIDIA instructions without an OpenCL C equivalent, as inline PTX: warp shuffles, asynchronous copies into local memory, matrix
// fragments and products (mma.sync, float32 accumulation). PTX ISA 8, sections 9.7.8 to 9.7.14.
// Only for devices whose driver takes PTX (the fact `ptx_arch` in llmcl/runtime/platforms.py); matrix products need sm_80 and later.
//
// m16n8k16: fragments of a 16 x 16 matrix A, of B (16 x 8) and of the result (16 x 8), by lane, with g = lane / 4, t = 2 (lane % 4):
//   A  a0 (g, t), a1 (g + 8, t), a2 (g, t + 8), a3 (g + 8, t + 8): two neighbouring columns each
//   B  b0 (t, g), b1 (t + 8, g): two neighbouring rows each
//   C  c0, c1 (g, t), c2, c3 (g + 8, t)

#define WARP 32

// For functions that take weights in flight by address: if the compiler leaves a call, the weights go to memory.
#define ALWAYS_INLINE inline __attribute__((always_inline))

inline float shuffle_xor(const float v, const int mask) {
    float r;
    asm volatile("shfl.sync.bfly.b32 %0, %1, %2, 31, 0xffffffff;" : "=f"(r) : "f"(v), "r"(mask));
    return r;
}

inline int shuffle_int(const int v, const int mask) { return as_int(shuffle_xor(as_float(v), mask)); }

inline float shuffle_from(const float v, const int lane) {
    float r;
    asm volatile("shfl.sync.idx.b32 %0, %1, %2, 31, 0xffffffff;" : "=f"(r) : "f"(v), "r"(lane));
    return r;
}

inline int shuffle_int_from(const int v, const int lane) { return as_int(shuffle_from(as_float(v), lane)); }

inline float warp_max(float v) {
    for (int mask = 16; mask > 0; mask /= 2) v = fmax(v, shuffle_xor(v, mask));
    return v;
}

inline float warp_sum(float v) {
    for (int mask = 16; mask > 0; mask /= 2) v += shuffle_xor(v, mask);
    return v;
}

// sm_80 and later.
inline uint warp_max_uint(const uint v) {
    uint r;
    asm volatile("redux.sync.max.u32 %0, %1, 0xffffffff;" : "=r"(r) : "r"(v));
    return r;
}
inline uint warp_min_uint(const uint v) {
    uint r;
    asm volatile("redux.sync.min.u32 %0, %1, 0xffffffff;" : "=r"(r) : "r"(v));
    return r;
}

// Returns true if `here` is true in any lane. A loop that continues for all lanes or for none keeps the warp together, as required
// by shuffles and barriers: lanes that wait apart may stay apart.
inline bool warp_any(const bool here) {
    uint any;
    asm volatile("{.reg .pred p, q; setp.ne.u32 p, %1, 0; vote.sync.any.pred q, p, 0xffffffff; selp.u32 %0, 1, 0, q;}"
                 : "=r"(any)
                 : "r"((uint)here)
                 : "memory");
    return any != 0;
}

// Returns the number of lanes in which `here` is true.
inline int warp_count(const bool here) {
    int lanes;
    asm volatile("{.reg .pred p; .reg .b32 all; setp.ne.u32 p, %1, 0; vote.sync.ballot.b32 all, p, 0xffffffff; popc.b32 %0, all;}"
                 : "=r"(lanes)
                 : "r"((uint)here));
    return lanes;
}

// Makes the lanes' writes to local memory visible to the whole warp.
inline void warp_sync(void) { asm volatile("bar.warp.sync 0xffffffff;" : : : "memory"); }

// Sums 8 values over the 16 lanes with equal parity, halving the values per lane in every step. The lane ends with value
// `sum8_index(lane)`, and so does lane ^ 2.
inline float sum8(const float v[8], const int lane) {
    float a[4], b[2];
    const bool high = lane & 16, middle = lane & 8, low = lane & 4;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float lower = v[i], upper = v[i + 4];  // not elements chosen by address, which would leave the registers
        a[i] = (high ? upper : lower) + shuffle_xor(high ? lower : upper, 16);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const float lower = a[i], upper = a[i + 2];
        b[i] = (middle ? upper : lower) + shuffle_xor(middle ? lower : upper, 8);
    }
    const float lower = b[0], upper = b[1];
    const float c = (low ? upper : lower) + shuffle_xor(low ? lower : upper, 4);
    return c + shuffle_xor(c, 2);
}

inline int sum8_index(const int lane) { return (lane >> 4) * 4 + ((lane >> 3) & 1) * 2 + ((lane >> 2) & 1); }

// A barrier for some of a work-group's warps, with `items` work-items in all; id 0 is used by barrier().
inline void named_barrier(const int id, const int items) {
    asm volatile("bar.sync %0, %1;" : : "r"(id), "r"(items) : "memory");
}

// Orders a work-item's accesses to global memory for the whole device.
inline void device_fence(void) { asm volatile("fence.acq_rel.gpu;" : : : "memory"); }

// Loads values written by other groups in this launch, bypassing the L1 cache, which is not coherent.
inline float load_shared_float(__global const float* p) {
    float v;
    asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(v) : "l"(p) : "memory");
    return v;
}

inline float2 load_shared_float2(__global const float* p) {
    float2 v;
    asm volatile("ld.global.cg.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "l"(p) : "memory");
    return v;
}

inline float4 load_shared_float4(__global const float* p) {
    float4 v;
    asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(p) : "memory");
    return v;
}

// Loads words that are written during polling: each word is either there or not.
inline uint4 load_relaxed4(__global const uint* p) {
    uint4 v;
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p)
                 : "memory");
    return v;
}
inline void store_relaxed4(__global uint* p, const uint4 v) {
    asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1, %2, %3, %4};"
                 :
                 : "l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
                 : "memory");
}

inline float8 load_shared_float8(__global const float* p) {
    return (float8)(load_shared_float4(p), load_shared_float4(p + 4));
}

// Loads that the compiler does not move: all loads of a run are in flight before the first use.
inline uint4 load16_words(__global const void* p) {
    uint4 v;
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}
inline uint2 load8_words(__global const void* p) {
    uint2 v;
    asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
    return v;
}
inline uint load4_words(__global const void* p) {
    uint v;
    asm volatile("ld.global.u32 %0, [%1];" : "=r"(v) : "l"(p));
    return v;
}

// Loads 16 bytes that are read once: bypasses the L1 cache, and prefetches the neighbours into the L2 cache. Not for memory written
// in the same launch.
inline uint4 stream16(__global const void* p) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p));
    return v;
}

// Prefetches the line of p into the L2 cache.
inline void fetch_line(__global const void* p) { asm volatile("prefetch.global.L2 [%0];" : : "l"(p)); }

// Widens the two values in a 32-bit word: the lower half first.
inline float2 widen_bf16(const uint u) { return (float2)(as_float(u << 16), as_float(u & 0xffff0000u)); }
inline float2 widen_f16(const uint u) {
    float2 v;
    asm("{.reg .b16 lo, hi;\n mov.b32 {lo, hi}, %2;\n cvt.f32.f16 %0, lo;\n cvt.f32.f16 %1, hi;}"
        : "=f"(v.x), "=f"(v.y)
        : "r"(u));
    return v;
}

// Rounds two values to nearest even into a word, a in the lower half.
inline uint narrow_bf16(const float a, const float b) {
    uint u;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(u) : "f"(b), "f"(a));
    return u;
}
inline uint narrow_f16(const float a, const float b) {
    uint u;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;"
        : "=r"(u)
        : "f"(fabs(b) > 65504.0f ? copysign(65504.0f, b) : b), "f"(fabs(a) > 65504.0f ? copysign(65504.0f, a) : a));
    return u;
}

// The same for softmax weights, which are at most 1.
#define narrow_weights_bf16 narrow_bf16
inline uint narrow_weights_f16(const float a, const float b) {
    uint u;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(u) : "f"(b), "f"(a));
    return u;
}

// a + b, rounded: never contracted into a multiply-add.
inline float add_rounded(const float a, const float b) {
    float r;
    asm("add.rn.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
    return r;
}

// Four byte products, added to c: unsigned or signed bytes of a, times signed bytes of b (sm_61 and later).
inline int dot4(const uint a, const int b, const int c) {
    int r;
    asm("dp4a.u32.s32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
    return r;
}
inline int dot4_signed(const uint a, const int b, const int c) {
    int r;
    asm("dp4a.s32.s32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
    return r;
}

// Picks four bytes from the eight bytes of a (0 to 3) and b (4 to 7): each hexadecimal digit of `choice` picks a byte, lowest first.
inline uint permute(const uint a, const uint b, const uint choice) {
    uint r;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(choice));
    return r;
}

// Arithmetic on the two float16 values in a word.
inline uint sub_f16x2(const uint a, const uint b) {
    uint r;
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}
inline uint mul_f16x2(const uint a, const uint b) {
    uint r;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}
inline uint fma_f16x2(const uint a, const uint b, const uint c) {
    uint r;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
    return r;
}

inline uint mul_bf16x2(const uint a, const uint b) {  // sm_90 and later
    uint r;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}

// Word i of v, without an address: with an address, v would leave the registers.
inline uint word_of(const uint4 v, const int i) { return i < 2 ? (i == 0 ? v.x : v.y) : (i == 2 ? v.z : v.w); }

// Returns v, but hides its origin from the compiler: otherwise the compiler would carry an address for each copy through a loop
// instead of deriving all addresses from the first.
inline int opaque(int v) {
    asm volatile("" : "+r"(v));
    return v;
}

// get_local_id(0), computed afresh: dependent values are computed at the place of use. In a kernel with many phases the compiler
// would otherwise compute all phases' addresses at the start and occupy registers.
inline int this_item(void) { return opaque(get_local_id(0)) & 1023; }  // tells the compiler that the result is not negative

// The 32-bit address in local memory, for the instructions below.
inline uint local_address(const __local void* p) { return (uint)(size_t)p; }

// Copies 16 bytes, or writes 16 zero bytes without reading.
inline void copy16_async(const uint to, __global const void* from, const bool read) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" : : "r"(to), "l"(from), "r"(read ? 16 : 0) : "memory");
}
inline void copy_commit(void) { asm volatile("cp.async.commit_group;" : : : "memory"); }
#define COPY_WAIT_ALL asm volatile("cp.async.wait_all;" : : : "memory")
#define COPY_WAIT(groups_in_flight) asm volatile("cp.async.wait_group %0;" : : "n"(groups_in_flight) : "memory")

// Loads four 8 x 8 matrices of 16-bit values; lanes 8 i .. 8 i + 7 give the addresses of matrix i's 16-byte rows.
inline uint4 load_matrices(const uint from) {
    uint4 v;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(from)
                 : "memory");
    return v;
}
inline uint4 load_matrices_transposed(const uint from) {
    uint4 v;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(from)
                 : "memory");
    return v;
}

// Transposes an 8 x 8 matrix of 16-bit numbers: a lane has two neighbours in row lane / 4.
inline uint transpose_matrix(const uint rows) {
    uint columns;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(columns) : "r"(rows));
    return columns;
}

inline void mma_bf16(float4* c, const uint4 a, const uint b0, const uint b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"((*c).x), "+f"((*c).y), "+f"((*c).z), "+f"((*c).w)
                 : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}
inline void mma_f16(float4* c, const uint4 a, const uint b0, const uint b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"((*c).x), "+f"((*c).y), "+f"((*c).z), "+f"((*c).w)
                 : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}

// m16n8k8 on tf32: float32 with a 10-bit mantissa; lower bits are ignored. By lane, with g = lane / 4, t = lane % 4:
//   A  a0 (g, t), a1 (g + 8, t), a2 (g, t + 4), a3 (g + 8, t + 4)     B  b0 (t, g), b1 (t + 4, g)     C as above
inline void mma_tf32(float4* c, const float4 a, const float2 b) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"((*c).x), "+f"((*c).y), "+f"((*c).z), "+f"((*c).w)
        : "r"(as_uint(a.x)), "r"(as_uint(a.y)), "r"(as_uint(a.z)), "r"(as_uint(a.w)), "r"(as_uint(b.x)), "r"(as_uint(b.y)));
}

// The nearest tf32 number; the remainder, v - near_tf32(v), is exact.
inline float4 near_tf32_4(const float4 v) { return as_float4((as_uint4(v) + 0x1000u) & 0xffffe000u); }
inline float2 near_tf32_2(const float2 v) { return as_float2((as_uint2(v) + 0x1000u) & 0xffffe000u); }
