// common/number_table.cl for the bytes of 16 words at once. With 8-bit dot products (DOT, see cpu/dot4.cl) the processor can look up
// bytes, too: vpshufb. Otherwise entries are chosen bit by bit.
// After common/tiles.cl. Build: WEIGHT, DOT.
#if DOT
#define TABLE_WORDS (uint4)((uint)TABLE_LOW, (uint)(TABLE_LOW >> 32), (uint)TABLE_HIGH, (uint)(TABLE_HIGH >> 32))
#if DOT == 3
inline uint8 look_up(const uint8 table, const uint8 codes) {
    uint8 numbers;
    __asm("vpshufb %2,%1,%0" : "=x"(numbers) : "x"(table), "x"(codes));
    return numbers;
}
inline uint16 table_numbers16(const uint16 codes) {
    const uint8 table = (uint8)(TABLE_WORDS, TABLE_WORDS);
    return (uint16)(look_up(table, codes.lo), look_up(table, codes.hi));
}
#elif DOT == 2
inline uint16 table_numbers16(const uint16 codes) {
    const uint16 table = (uint16)(TABLE_WORDS, TABLE_WORDS, TABLE_WORDS, TABLE_WORDS);
    uint16 numbers;
    __asm("vpshufb %2,%1,%0" : "=v"(numbers) : "v"(table), "v"(codes));
    return numbers;
}
#else
typedef char char64_of_table __attribute__((ext_vector_type(64)));
char64_of_table vpshufb_512(char64_of_table table, char64_of_table codes) __asm("llvm.x86.avx512.pshuf.b.512");
inline uint16 table_numbers16(const uint16 codes) {
    const uint16 table = (uint16)(TABLE_WORDS, TABLE_WORDS, TABLE_WORDS, TABLE_WORDS);
    return __builtin_astype(vpshufb_512(__builtin_astype(table, char64_of_table), __builtin_astype(codes, char64_of_table)), uint16);
}
#endif
#else
inline uint16 table_numbers16(const uint16 codes) {
    const uint16 first = MASK_OF(codes, 0), second = MASK_OF(codes, 1), third = MASK_OF(codes, 2);
    return CHOOSE(uint16);
}
#endif
