// What a kernel does otherwise as a link of portable/layer_chain.cl: its local memory is the launch's, and its work-groups begin
// before what they read is there.
//
//   LOCAL_ARRAY(type, name, count, at)   a local array, in a chain `at` bytes (a multiple of 16) behind the beginning of `memory`
//   AWAIT(link)                          by all work-items: what the links before it write is there from then on. What does not change
//                                        in a step, such as weights, is asked for before
//   LINK_FIELD, LINK_VALUE               of a structure that hands `link` on
//
// A link is the function of a kernel, with LINK_PARAMS in front of its arguments.
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
