// What a work-item computes at once: WIDTH neighbouring columns, a vector of 16 on a CPU, 1 elsewhere. Any address will do: vload16
// would, too, but is a call into the driver's library (common.cl).
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
