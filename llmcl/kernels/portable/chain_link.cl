// Macros for kernels that also run as a link in portable/layer_chain.cl. Local memory then belongs to the launch, and work-groups may
// start before their input is ready.
//
//   LOCAL_ARRAY(type, name, count, at)   a local array; in a chain at byte offset `at` (a multiple of 16) in `memory`
//   AWAIT(link)                          called by all work-items: waits for the writes of earlier links. Data that is constant during a
//                                        step, such as weights, is requested before
//   LINK_FIELD, LINK_VALUE               a structure field that passes `link` on
//
// A link is a kernel's function, with LINK_PARAMS before its arguments.
#ifdef CHAINED
#define LOCAL_ARRAY(type, name, count, at) __local type* const name = (__local type*)(memory + (at))
#define AWAIT(link) await_links(link)
#define LINK_FIELD const awaited* link;
#define LINK_VALUE , link
#else
#define LOCAL_ARRAY(type, name, count, at) __local type name[count] __attribute__((aligned(16)))
#define AWAIT(link)
#define LINK_FIELD
#define LINK_VALUE
#endif
