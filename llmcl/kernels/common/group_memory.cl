// Memory of a work-group: OF_GROUP int name[N] in a kernel, and WAIT between its writing and its reading by others.
//
// A group of one work-item needs no local memory, which functions of a persistent kernel cannot have: there it is private.
// Build: LOCAL_SIZE.
#if LOCAL_SIZE > 1
#define OF_GROUP __local
#define WAIT barrier(CLK_LOCAL_MEM_FENCE)
#define TAKE_NEXT(p) atomic_inc(p)  // its value before one is added
#else
#define OF_GROUP
#define WAIT
#define TAKE_NEXT(p) ((*(p))++)
#endif
