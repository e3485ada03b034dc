// A unit of cpu/persistent_step.cl that another thread may take over, since the system may suspend the one that computes it for long.
//
// The kernel computes a piece of its output into memory of its own, and stores it only if the unit is still its own:
//
//   BEGIN_UNIT;  for each piece from PIECES_STORED on:  compute | if (!MAY_STORE) return; | store | PIECE_STORED;
//
// So each piece is stored once, by one thread, whoever else computed it; even `out += y` is allowed. A unit is open while no piece is
// in the middle of being stored. Who takes it over begins after the pieces that are stored. What the kernel reads may
// change under a thread that has lost its unit: it computes nonsense, which nobody stores, but no address may depend on it.
//
// A work-group has the word of its unit in `own`: 1 + the unit, the pieces that are stored, and UNIT_CLOSED while a piece is being
// stored. A kernel without these macros leaves 0 there, so nobody takes its units over. In a launch of its own a unit stays where it is.
//
// RELEASE stands between what others are to see and the word that says so, ACQUIRE behind the reading of such a word. OpenCL's
// mem_fence is more: Intel's compiler makes an instruction of it that waits until all stores have reached the cache, for 0.1 us a unit
// and more. These two are none on x86, where stores are seen in their order.
#ifdef __has_builtin
#if __has_builtin(__atomic_thread_fence)
#define RELEASE __atomic_thread_fence(__ATOMIC_RELEASE)
#define ACQUIRE __atomic_thread_fence(__ATOMIC_ACQUIRE)
#endif
#endif
#ifndef RELEASE
#define RELEASE mem_fence(CLK_GLOBAL_MEM_FENCE)
#define ACQUIRE mem_fence(CLK_GLOBAL_MEM_FENCE)
#endif

#define MAX_PIECES 2048
#define PIECE_BYTES (1 << 18)  // that a piece should read, some 20 us: so much is lost where a unit is taken over
// How many of n vectors, for each of which so many bytes are read, are a piece: 64 or fewer, but of MAX_PIECES pieces at most.
#define PIECE_OF(bytes, n) ((int)((bytes) < PIECE_BYTES / 64 ? 64 : MAX(1, PIECE_BYTES / (bytes))) + 2 * (int)(n) / MAX_PIECES)
#define UNIT_CLOSED 1u
#define UNIT_TAKEN 0xffffffffu
#define UNIT_WORD(unit) (((unit) + 1u) * (2u * MAX_PIECES))
#define UNIT_OF(word) ((word) / (2u * MAX_PIECES) - 1u)

#ifdef MAX_GROUPS  // part of the persistent kernel
#define BEGIN_UNIT *own = word
#define PIECES_STORED ((int)(word / 2u % MAX_PIECES))
#define MAY_STORE (atomic_cmpxchg(own, word, word | UNIT_CLOSED) == word)
#define PIECE_STORED RELEASE, *own = word += 2u
#else
#define BEGIN_UNIT
#define PIECES_STORED 0
#define MAY_STORE true
#define PIECE_STORED
#endif
