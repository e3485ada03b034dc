// Copies boxes of an array into local memory with Hopper's copy engine (TMA, PTX ISA 8.3, sections 9.7.9.25 and 9.7.9.27): a single
// work-item asks for a box, and no other work-item's registers or addresses are needed. Include after wgmma.cl.
//
// A tensor map describes an array to the engine: 128 bytes in global memory. In other APIs the host encodes the map; here a warp
// builds it, field by field, without knowledge of its format.
#define TENSOR_MAP_BYTES 128

// An array of 16-bit values with 4 axes: `sizes` of the outer three (the inner size is `columns`), `strides` in bytes between
// neighbours on the outer axes. A box is 64 columns by `box_rows` rows; in local memory column piece c of row j is at j 128 + (c ^
// j % 8) 16, where j counts from a multiple of 1024 bytes. Values outside the array are copied as zero.
typedef struct {
    int columns, box_rows;
    int sizes[3];
    long strides[3];
} array_form;

#define SET_FIELD(field, value) \
    asm volatile("//sm_90a tensormap.replace.tile." field ".shared::cta.b1024.b32 [%0], %1;" : : "r"(at), "n"(value) : "memory")
#define SET_OF_AXIS(field, axis, value)                                                                   \
    asm volatile("//sm_90a tensormap.replace.tile." field ".shared::cta.b1024.b32 [%0], " #axis ", %1;" \
                 :                                                                                        \
                 : "r"(at), "r"(value)                                                                    \
                 : "memory")
#define SET_STRIDE(axis, value)                                                                                  \
    asm volatile("//sm_90a tensormap.replace.tile.global_stride.shared::cta.b1024.b64 [%0], " #axis ", %1;" \
                 :                                                                                               \
                 : "r"(at), "l"(value)                                                                           \
                 : "memory")

// Makes an array's map at `map`, 128 bytes used by the calling warp only; `at`: as much local memory. Both begin at multiples of
// 128 bytes.
inline void make_tensor_map(__global void* map, const uint at, __global const void* array, const array_form form, const int lane) {
    store4_local(at + lane * 4, 0);
    warp_sync();
    if (lane == 0) {
        asm volatile("//sm_90a tensormap.replace.tile.global_address.shared::cta.b1024.b64 [%0], %1;"
                     :
                     : "r"(at), "l"(array)
                     : "memory");
        SET_FIELD("rank", 3);  // rank minus one
        SET_FIELD("elemtype", 1);  // 16 bits
        SET_FIELD("interleave_layout", 0);
        SET_FIELD("swizzle_mode", 3);  // 128 bytes
        SET_FIELD("fill_mode", 0);
        SET_OF_AXIS("box_dim", 0, 64);
        SET_OF_AXIS("box_dim", 1, form.box_rows);
        SET_OF_AXIS("box_dim", 2, 1);
        SET_OF_AXIS("box_dim", 3, 1);
        SET_OF_AXIS("global_dim", 0, form.columns);
        SET_OF_AXIS("global_dim", 1, form.sizes[0]);
        SET_OF_AXIS("global_dim", 2, form.sizes[1]);
        SET_OF_AXIS("global_dim", 3, form.sizes[2]);
        SET_STRIDE(0, form.strides[0]);
        SET_STRIDE(1, form.strides[1]);
        SET_STRIDE(2, form.strides[2]);
        SET_OF_AXIS("element_stride", 0, 1);
        SET_OF_AXIS("element_stride", 1, 1);
        SET_OF_AXIS("element_stride", 2, 1);
        SET_OF_AXIS("element_stride", 3, 1);
    }
    warp_sync();
    asm volatile("//sm_90a tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned [%0], [%1], 128;"
                 :
                 : "l"(map), "r"(at)
                 : "memory");
    asm volatile("//sm_90a fence.proxy.tensormap::generic.acquire.gpu [%0], 128;" : : "l"(map) : "memory");
}

// Asks for the box that begins at the given column, row, second and third index; the barrier (mbarrier_expect) counts its bytes.
inline void copy_box(const uint to, __global const void* map, const int column, const int row, const int second, const int third,
                     const uint barrier) {
    asm volatile("//sm_90a cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3, %4, %5}], [%6];"
                 :
                 : "r"(to), "l"(map), "r"(column), "r"(row), "r"(second), "r"(third), "r"(barrier)
                 : "memory");
}

// Arrives at a barrier. The phase ends only after `bytes` bytes have been copied, too.
inline void mbarrier_expect(const uint at, const uint bytes) {
    asm volatile("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;" : : "r"(at), "r"(bytes) : "memory");
}
