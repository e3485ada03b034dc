// The steps of 16 in a wgmma product (wgmma.cl) as a single statement, with its commit: compilers are slow with statements that
// have as many operands as sums. STEP(i) are the operands of step i.
//
//   WGMMA_ROWS_128_CHAIN_n(TYPE, s, STEP)     s (float [64] per lane) = A B, n steps, B in ROWS_128; STEP(i): "l"(a), "l"(b)
//   WGMMA_FRAGMENTS_c_CHAIN_8(TYPE, s, STEP)  s (float [c / 2]) += A B for c columns, 8 steps; STEP(i): FRAGMENTS_STEP(a, b), where A is
//                                             uint4 fragments per lane
#define CHAIN_LINE(TYPE, SHAPE) "//sm_90a wgmma.mma_async.sync.aligned.m64" SHAPE "k16.f32." #TYPE "." #TYPE " {"
#define CHAIN_COMMIT "//sm_90a wgmma.commit_group.sync.aligned;"
#define STEPS_4(STEP) STEP(0), STEP(1), STEP(2), STEP(3)
#define STEPS_6(STEP) STEPS_4(STEP), STEP(4), STEP(5)
#define STEPS_8(STEP) STEPS_6(STEP), STEP(6), STEP(7)

#define ROWS_LINE(TYPE, KEEP, a, b) \
    CHAIN_LINE(TYPE, "n128") SUMS_FROM_0 ", " SUMS_FROM_32 "}, %" #a ", %" #b ", " #KEEP ", 1, 1, 0, 0;\n"
#define ROWS_LINES_4(TYPE) \
    ROWS_LINE(TYPE, 0, 64, 65) ROWS_LINE(TYPE, 1, 66, 67) ROWS_LINE(TYPE, 1, 68, 69) ROWS_LINE(TYPE, 1, 70, 71)
#define ROWS_LINES_6(TYPE) ROWS_LINES_4(TYPE) ROWS_LINE(TYPE, 1, 72, 73) ROWS_LINE(TYPE, 1, 74, 75)
#define ROWS_LINES_8(TYPE) ROWS_LINES_6(TYPE) ROWS_LINE(TYPE, 1, 76, 77) ROWS_LINE(TYPE, 1, 78, 79)
#define WGMMA_ROWS_128_CHAIN_4(TYPE, s, STEP) asm volatile(ROWS_LINES_4(TYPE) CHAIN_COMMIT : NEW64(s) : STEPS_4(STEP) : "memory")
#define WGMMA_ROWS_128_CHAIN_6(TYPE, s, STEP) asm volatile(ROWS_LINES_6(TYPE) CHAIN_COMMIT : NEW64(s) : STEPS_6(STEP) : "memory")
#define WGMMA_ROWS_128_CHAIN_8(TYPE, s, STEP) asm volatile(ROWS_LINES_8(TYPE) CHAIN_COMMIT : NEW64(s) : STEPS_8(STEP) : "memory")

#define FRAGMENTS_STEP(a, b) "r"((a).x), "r"((a).y), "r"((a).z), "r"((a).w), "l"(b)
#define FRAGMENTS_OPERANDS(a, b, c, d, e) "}, {%" #a ", %" #b ", %" #c ", %" #d "}, %" #e ", 1, 1, 1, 1;\n"
#define FRAGMENTS_64_LINE(TYPE, a, b, c, d, e) CHAIN_LINE(TYPE, "n64") SUMS_FROM_0 FRAGMENTS_OPERANDS(a, b, c, d, e)
#define FRAGMENTS_96_LINE(TYPE, a, b, c, d, e) \
    CHAIN_LINE(TYPE, "n96") SUMS_FROM_0 ", " SUMS_FROM_32_TO_48 FRAGMENTS_OPERANDS(a, b, c, d, e)
#define FRAGMENTS_128_LINE(TYPE, a, b, c, d, e) \
    CHAIN_LINE(TYPE, "n128") SUMS_FROM_0 ", " SUMS_FROM_32 FRAGMENTS_OPERANDS(a, b, c, d, e)
#define WGMMA_FRAGMENTS_64_CHAIN_8(TYPE, s, STEP)                                                                     \
    asm volatile(FRAGMENTS_64_LINE(TYPE, 32, 33, 34, 35, 36) FRAGMENTS_64_LINE(TYPE, 37, 38, 39, 40, 41)              \
                 FRAGMENTS_64_LINE(TYPE, 42, 43, 44, 45, 46) FRAGMENTS_64_LINE(TYPE, 47, 48, 49, 50, 51)              \
                 FRAGMENTS_64_LINE(TYPE, 52, 53, 54, 55, 56) FRAGMENTS_64_LINE(TYPE, 57, 58, 59, 60, 61)              \
                 FRAGMENTS_64_LINE(TYPE, 62, 63, 64, 65, 66) FRAGMENTS_64_LINE(TYPE, 67, 68, 69, 70, 71) CHAIN_COMMIT \
                 : SUMS32(s, 0)                                                                                       \
                 : STEPS_8(STEP)                                                                                      \
                 : "memory")
#define WGMMA_FRAGMENTS_96_CHAIN_8(TYPE, s, STEP)                                                                     \
    asm volatile(FRAGMENTS_96_LINE(TYPE, 48, 49, 50, 51, 52) FRAGMENTS_96_LINE(TYPE, 53, 54, 55, 56, 57)              \
                 FRAGMENTS_96_LINE(TYPE, 58, 59, 60, 61, 62) FRAGMENTS_96_LINE(TYPE, 63, 64, 65, 66, 67)              \
                 FRAGMENTS_96_LINE(TYPE, 68, 69, 70, 71, 72) FRAGMENTS_96_LINE(TYPE, 73, 74, 75, 76, 77)              \
                 FRAGMENTS_96_LINE(TYPE, 78, 79, 80, 81, 82) FRAGMENTS_96_LINE(TYPE, 83, 84, 85, 86, 87) CHAIN_COMMIT \
                 : SUMS32(s, 0), SUMS8(s, 32), SUMS8(s, 40)                                                           \
                 : STEPS_8(STEP)                                                                                      \
                 : "memory")
#define WGMMA_FRAGMENTS_128_CHAIN_8(TYPE, s, STEP)                                                                         \
    asm volatile(FRAGMENTS_128_LINE(TYPE, 64, 65, 66, 67, 68) FRAGMENTS_128_LINE(TYPE, 69, 70, 71, 72, 73)                 \
                 FRAGMENTS_128_LINE(TYPE, 74, 75, 76, 77, 78) FRAGMENTS_128_LINE(TYPE, 79, 80, 81, 82, 83)                 \
                 FRAGMENTS_128_LINE(TYPE, 84, 85, 86, 87, 88) FRAGMENTS_128_LINE(TYPE, 89, 90, 91, 92, 93)                 \
                 FRAGMENTS_128_LINE(TYPE, 94, 95, 96, 97, 98) FRAGMENTS_128_LINE(TYPE, 99, 100, 101, 102, 103) CHAIN_COMMIT \
                 : KEPT64(s)                                                                                               \
                 : STEPS_8(STEP)                                                                                           \
                 : "memory")
