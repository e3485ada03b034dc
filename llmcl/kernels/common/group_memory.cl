// Work-group memory: OF_GROUP int name[N] in a kernel, with WAIT between a write and reads by other work-items.
//
// A group with a single work-item uses private memory, because functions in a persistent kernel cannot have local memory.
// Build: LOCAL_SIZE.
#if LOCAL_SIZE > 1
#define OF_GROUP __local
#define WAIT barrier(CLK_LOCAL_MEM_FENCE)
#define TAKE_NEXT(p) atomic_inc(p)  // returns the value before the increment
#else
#define OF_GROUP
#define WAIT
#define TAKE_NEXT(p) ((*(p))++)
#endif
