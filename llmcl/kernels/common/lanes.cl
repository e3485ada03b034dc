// The columns computed by a work-item at once: WIDTH neighbouring columns, 16 on a CPU (a vector), otherwise 1. Addresses may be
// unaligned: vload16 would work, too, but is a call into the driver's library (common.cl).
#if WIDTH == 16
typedef struct __attribute__((packed, aligned(4))) {
    float16 v;
} unaligned16_t;
#define lanes_t float16
#define load_lanes(p) (((__global const unaligned16_t*)(p))->v)
#define store_lanes(value, p) (((__global unaligned16_t*)(p))->v = (value))
#define lanes_sum(value) sum16(value)
#define lanes_exp(value) exp16(value)
#elif WIDTH == 1
#define lanes_t float
#define load_lanes(p) (*(p))
#define store_lanes(value, p) (*(p) = (value))
#define lanes_sum(value) (value)
#define lanes_exp(value) exp(value)
#else
#error "lanes.cl needs a WIDTH of 1 or 16"
#endif
