// out = A B by an asynchronous product with two steps, to find out whether device and driver take wgmma (nvidia/wgmma.py).
//
// a    half fragments of A [64][32]: uint4 [2 steps][128]         b  half [4 tiles][32][16]: B [32][64] in tiles of 16 columns
// out  float [64][64]
// Index space: a single group with 128 work-items. Build: none. Local memory: 4096 bytes.
#include "common/common.cl"
#include "nvidia/wgmma.cl"

__kernel __attribute__((reqd_work_group_size(WARPGROUP, 1, 1)))
void wgmma_probe(__global const uint4* a, __global const f16_t* b, __global float* out) {
    __local uint4 __attribute__((aligned(1024))) tiles[256];
    const int lid = get_local_id(0), lane = lid % WARP;
    for (int piece = lid; piece < 256; piece += WARPGROUP)
        copy16_async(local_address(tiles) + (piece ^ ((piece >> 3) & 1)) * 16, b + piece * 8, true);
    copy_commit();
    COPY_WAIT(0);
    local_fence_async();
    barrier(CLK_LOCAL_MEM_FENCE);
    float sums[32];
    const uint4 a0 = a[lid], a1 = a[WARPGROUP + lid];
    const ulong operand = wgmma_operand(local_address(tiles), 1024, 256, SWIZZLE_32);
    wgmma_fence();
    WGMMA_FRAGMENTS_64(f16, sums, a0, operand, 0);
    WGMMA_FRAGMENTS_64(f16, sums, a1, operand + 512 / 16, 1);
    wgmma_commit();
    WGMMA_WAIT(0);
    WGMMA_SETTLE32(sums, 0);
    out += (lid / WARP * 16 + lane / 4) * 64 + 2 * (lane % 4);
#pragma unroll
    for (int i = 0; i < 32; ++i) out[i % 4 / 2 * 8 * 64 + i / 4 * 8 + i % 2] = sums[i];
}
