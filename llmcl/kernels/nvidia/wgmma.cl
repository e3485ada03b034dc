// Hopper's asynchronous matrix products (wgmma, PTX ISA 8, section 9.7.15), for devices that pass `has_wgmma`.
//
// NVIDIA's OpenCL compiler assembles for sm_90 and refuses these sm_90a instructions. They are written as PTX comments, and
// runtime/ptx_splice.py turns the comments into instructions in the program's text.
//
// A warpgroup (4 warps) multiplies A (64 x 16) by B (16 x n) into float32 sums. B is in local memory, A in local memory
// or registers. A warp holds 16 rows of A and of the sums, in fragments as drawn in ptx.cl: a lane has 4 sums per 8
// columns.
#include "nvidia/ptx.cl"

#define WARPGROUP 128

// Orders a work-item's earlier writes to local memory before the matrix units' reads, after a group barrier.
inline void local_fence_async(void) { asm volatile("fence.proxy.async.shared::cta;" : : : "memory"); }

// Needed before the first product after writes to its registers or local memory.
inline void wgmma_fence(void) { asm volatile("//sm_90a wgmma.fence.sync.aligned;" : : : "memory"); }
inline void wgmma_commit(void) { asm volatile("//sm_90a wgmma.commit_group.sync.aligned;" : : : "memory"); }
#define WGMMA_WAIT(groups_in_flight) \
    asm volatile("//sm_90a wgmma.wait_group.sync.aligned %0;" : : "n"(groups_in_flight) : "memory")

// Operand layouts in local memory (section 9.7.15.5.1.2), `leading` and `stride` in bytes:
//
//   NO_SWIZZLE  A, rows of k: blocks of 8 rows x 8 columns, 128 bytes each; leading: to the next 8 columns, stride: 8 rows
//   SWIZZLE_32  B, as weights and keys are stored: 32 bytes per k, 16 columns; leading: to the next 16 columns, stride: 8 k.
//               The 16-byte halves are swapped for odd k / 4.
//   SWIZZLE_128 B, as values are stored: 128 bytes per k, 64 columns; leading: to the next 64 columns, stride: 8 k.
//               A 16-byte piece c is at place c ^ (k % 8).
//   ROWS_128    B by columns, 64 k in 128 bytes per column (wgmma_chains.cl); stride: 8 columns; 16 k further on is 32 bytes.
//               A 16-byte piece c is at place c ^ (column % 8).
//   ROWS_64     A, 32 k in 64 bytes per row; stride: 8 rows; 16 k further on is 32 bytes. A 16-byte piece c is at place
//               c ^ (row / 2 % 4).
#define NO_SWIZZLE 0
#define SWIZZLE_128 1
#define ROWS_128 1
#define ROWS_64 2
#define SWIZZLE_32 3
#define OPERAND_LOW(address, leading) (((address) & 0x3ffff) >> 4 | (leading) >> 4 << 16)
#define OPERAND(low, stride, swizzle) ((ulong)(low) | (ulong)((stride) >> 4 | (swizzle) << 30) << 32)
inline ulong wgmma_operand(const uint address, const uint leading, const uint stride, const int swizzle) {
    return (ulong)((address & 0x3ffff) >> 4) | (ulong)(leading >> 4) << 16 | (ulong)(stride >> 4) << 32 | (ulong)swizzle << 62;
}

// Sets the registers per work-item of the calling warpgroup from now on: a multiple of 8, given up by other warpgroups before.
#define WGMMA_FEWER_REGISTERS(n) asm volatile("//sm_90a setmaxnreg.dec.sync.aligned.u32 %0;" : : "n"(n) : "memory")
#define WGMMA_MORE_REGISTERS(n) asm volatile("//sm_90a setmaxnreg.inc.sync.aligned.u32 %0;" : : "n"(n) : "memory")

#define SUMS_FROM_0 \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define SUMS_FROM_32 \
    "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define SUMS_FROM_32_TO_48 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define SUMS_FROM_64 \
    "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
    "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define SUMS_FROM_96 \
    "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
    "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define SUMS8(s, i) \
    "+f"((s)[i]), "+f"((s)[i + 1]), "+f"((s)[i + 2]), "+f"((s)[i + 3]), "+f"((s)[i + 4]), "+f"((s)[i + 5]), "+f"((s)[i + 6]), \
        "+f"((s)[i + 7])
#define NEW8(s, i) \
    "=f"((s)[i]), "=f"((s)[i + 1]), "=f"((s)[i + 2]), "=f"((s)[i + 3]), "=f"((s)[i + 4]), "=f"((s)[i + 5]), "=f"((s)[i + 6]), \
        "=f"((s)[i + 7])
#define NEW32(s, i) NEW8(s, i), NEW8(s, i + 8), NEW8(s, i + 16), NEW8(s, i + 24)
#define NEW64(s) NEW32(s, 0), NEW32(s, 32)
#define KEPT64(s) SUMS32(s, 0), SUMS32(s, 32)
#define SUMS32(s, i) SUMS8(s, i), SUMS8(s, i + 8), SUMS8(s, i + 16), SUMS8(s, i + 24)

// sums (float [N / 2] per lane) = A B + KEEP sums, for N columns. TYPE: f16 or bf16; KEEP: 0 or 1; A and B: operands in local
// memory, or for A uint4 fragments per lane (WGMMA_FRAGMENTS_N).
#define WGMMA_128_(TYPE, a, b, KEEP, TRANSPOSED_B, SUMS)                                                               \
    asm volatile("//sm_90a wgmma.mma_async.sync.aligned.m64n128k16.f32." #TYPE "." #TYPE " {" SUMS_FROM_0 ", " SUMS_FROM_32 \
                 "}, %64, %65, " #KEEP ", 1, 1, 0, " #TRANSPOSED_B ";"                                               \
                 : SUMS                                                                                              \
                 : "l"(a), "l"(b))
#define WGMMA_128(TYPE, s, a, b, KEEP) WGMMA_128_(TYPE, a, b, KEEP, 1, KEPT64(s))
// sums = A B, ignoring earlier sums: until then the sums take no registers.
#define WGMMA_128_NEW(TYPE, s, a, b) WGMMA_128_(TYPE, a, b, 0, 1, NEW64(s))
#define WGMMA_64_(TYPE, s, a, b, KEEP)                                                           \
    asm volatile("//sm_90a wgmma.mma_async.sync.aligned.m64n64k16.f32." #TYPE "." #TYPE " {" SUMS_FROM_0 \
                 "}, %32, %33, " #KEEP ", 1, 1, 0, 1;"                                           \
                 : SUMS32(s, 0)                                                                  \
                 : "l"(a), "l"(b))
#define WGMMA_64(TYPE, s, a, b, KEEP) WGMMA_64_(TYPE, s, a, b, KEEP)
#define WGMMA_192_(TYPE, s, a, b, KEEP) \
    asm volatile("//sm_90a wgmma.mma_async.sync.aligned.m64n192k16.f32." #TYPE "." #TYPE " {" SUMS_FROM_0 ", " SUMS_FROM_32 ", " SUMS_FROM_64 \
                 "}, %96, %97, " #KEEP ", 1, 1, 0, 1;" \
                 : SUMS32(s, 0), SUMS32(s, 32), SUMS32(s, 64) \
                 : "l"(a), "l"(b))
#define WGMMA_192(TYPE, s, a, b, KEEP) WGMMA_192_(TYPE, s, a, b, KEEP)
#define WGMMA_256_(TYPE, s, a, b, KEEP) \
    asm volatile("//sm_90a wgmma.mma_async.sync.aligned.m64n256k16.f32." #TYPE "." #TYPE " {" SUMS_FROM_0 ", " SUMS_FROM_32 ", " SUMS_FROM_64 ", " SUMS_FROM_96 \
                 "}, %128, %129, " #KEEP ", 1, 1, 0, 1;" \
                 : SUMS32(s, 0), SUMS32(s, 32), SUMS32(s, 64), SUMS32(s, 96) \
                 : "l"(a), "l"(b))
#define WGMMA_256(TYPE, s, a, b, KEEP) WGMMA_256_(TYPE, s, a, b, KEEP)
#define WGMMA_FRAGMENTS_64_(TYPE, s, a, b, KEEP) \
    asm volatile("//sm_90a wgmma.mma_async.sync.aligned.m64n64k16.f32." #TYPE "." #TYPE " {" SUMS_FROM_0 \
                 "}, {%32, %33, %34, %35}, %36, " #KEEP ", 1, 1, 1;" \
                 : SUMS32(s, 0) \
                 : "r"((a).x), "r"((a).y), "r"((a).z), "r"((a).w), "l"(b))
#define WGMMA_FRAGMENTS_64(TYPE, s, a, b, KEEP) WGMMA_FRAGMENTS_64_(TYPE, s, a, b, KEEP)
#define WGMMA_FRAGMENTS_128_(TYPE, s, a, b, KEEP) \
    asm volatile("//sm_90a wgmma.mma_async.sync.aligned.m64n128k16.f32." #TYPE "." #TYPE " {" SUMS_FROM_0 ", " SUMS_FROM_32 \
                 "}, {%64, %65, %66, %67}, %68, " #KEEP ", 1, 1, 1;" \
                 : SUMS32(s, 0), SUMS32(s, 32) \
                 : "r"((a).x), "r"((a).y), "r"((a).z), "r"((a).w), "l"(b))
#define WGMMA_FRAGMENTS_128(TYPE, s, a, b, KEEP) WGMMA_FRAGMENTS_128_(TYPE, s, a, b, KEEP)

// After a wait, before ordinary use of the sums: keeps the compiler from moving the use ahead of the wait.
#define WGMMA_SETTLE32(s, i) asm volatile("" : SUMS32(s, i))
#define WGMMA_SETTLE16(s, i) asm volatile("" : SUMS8(s, i), SUMS8(s, i + 8))

inline void store4_local(const uint to, const uint v) {
    asm volatile("st.shared.u32 [%0], %1;" : : "r"(to), "r"(v) : "memory");
}

// Barriers in local memory (8 bytes each): some work-items arrive, others wait. Each phase ends after `count` arrivals; a waiter
// passes the parity of the phase to wait for.
inline void mbarrier_init(const uint at, const uint count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" : : "r"(at), "r"(count) : "memory");
}
inline void mbarrier_arrive(const uint at) {
    asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" : : "r"(at) : "memory");
}
// Bounded: a defect then shows as wrong numbers instead of a hanging device.
inline void mbarrier_wait(const uint at, const uint parity) {
    for (uint tries = 0, over = 0; !over && tries < 1 << 22; ++tries)
        asm volatile("{.reg .pred p;\n mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 p, [%1], %2;\n selp.u32 %0, 1, 0, p;}"
                     : "=r"(over)
                     : "r"(at), "r"(parity)
                     : "memory");
}
