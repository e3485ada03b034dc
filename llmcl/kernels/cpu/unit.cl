// A unit of cpu/persistent_step.cl that another thread may take over, because the system may suspend the computing thread for long.
//
// The kernel computes a piece of its output in private memory, and stores the piece only if the work-group still owns the unit:
//
//   BEGIN_UNIT;  for each piece from PIECES_STORED on:  compute | if (!MAY_STORE) return; | store | PIECE_STORED;
//
// Each piece is thus stored exactly once, by one thread, even if several compute it; `out += y` is allowed too. A unit can be taken
// over while no piece is being stored. The new owner continues after the stored pieces. A thread that lost its unit may read changing
// data: it computes garbage that nobody stores, but no address may depend on such data.
//
// A work-group keeps its unit's word in `own`: 1 + the unit, the number of stored pieces, and UNIT_CLOSED while a piece is being
// stored. A kernel without these macros leaves 0 there, so nobody takes its units over. In a separate launch a unit is never taken over.
//
// RELEASE stands between published data and the word that announces it, ACQUIRE after reading such a word. OpenCL's mem_fence does
// more: Intel's compiler emits an instruction that waits until all stores have reached the cache, at 0.1 us per unit and more. Both
// macros cost nothing on x86, where stores become visible in order.
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
#define PIECE_BYTES (1 << 18)  // read per piece, some 20 us: the loss when a unit is taken over
// Vectors per piece, for n vectors with `bytes` read each: 64 or fewer, but at most MAX_PIECES pieces.
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
