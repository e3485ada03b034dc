// Copies a box of an array with the copy engine, to find out whether device and driver take tensor maps (nvidia/wgmma.py).
//
// a    half [2][3][20][128]         map  128 bytes         out  half [64][64]: the box at [1][2][4][64], pieces of 8 columns exchanged
// Index space: a single group with 32 work-items. Build: none. Local memory: 8336 bytes.
#include "common/common.cl"
#include "nvidia/wgmma.cl"
#include "nvidia/tensor_map.cl"

__kernel __attribute__((reqd_work_group_size(WARP, 1, 1)))
void tensor_map_probe(__global const f16_t* a, __global char* map, __global uint4* out) {
    __local uint4 __attribute__((aligned(1024))) box[512];
    __local uint4 __attribute__((aligned(128))) fields[TENSOR_MAP_BYTES / 16];
    __local ulong copied[1];
    const int lane = get_local_id(0);
    const uint barrier_at = local_address(copied);
    if (lane == 0) mbarrier_init(barrier_at, 1);
    local_fence_async();
    const array_form form = {128, 64, {20, 3, 2}, {256, 20 * 256, 60 * 256}};
    make_tensor_map(map, local_address(fields), a, form, lane);
    if (lane == 0) {
        mbarrier_expect(barrier_at, 64 * 128);
        copy_box(local_address(box), map, 64, 4, 2, 1, barrier_at);
    }
    mbarrier_wait(barrier_at, 0);
    for (int i = lane; i < 512; i += WARP) out[i] = box[i];
}
