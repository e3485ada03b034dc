// What a work-item computes at once: WIDTH neighbouring columns, a vector of 16 on a CPU, 1 elsewhere. Any address will do.
#if WIDTH == 16
#define lanes_t float16
#define load_lanes(p) vload16(0, p)
#define store_lanes(v, p) vstore16(v, 0, p)
#define lanes_sum(v) sum16(v)
#define lanes_exp(v) exp16(v)
#elif WIDTH == 1
#define lanes_t float
#define load_lanes(p) (*(p))
#define store_lanes(v, p) (*(p) = (v))
#define lanes_sum(v) (v)
#define lanes_exp(v) exp(v)
#else
#error "lanes.cl needs a WIDTH of 1 or 16"
#endif
