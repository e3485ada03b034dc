// Numbers by code, for ggml's iq formats: a code has 3 or 4 bits, a number is stored plus 128.
//
//   TABLE_IQ4       -127 .. 113, spaced more closely around 0
//   TABLE_IQ3_S, TABLE_IQ3_XXS, TABLE_IQ2    8, 8 and 3 sizes with a sign
//   TABLE_IQ1       in eighths: -1, 0 or 1, and an eighth more or less
//
// Codes 6 and 7 of TABLE_IQ2 and TABLE_IQ1 don't occur in checkpoints. llmcl/checkpoint/low_bits.py has the same tables.
// Build: NUMBER_TABLE, one of these names.
#define TABLE_IQ4 1
#define TABLE_IQ3_S 2
#define TABLE_IQ3_XXS 3
#define TABLE_IQ2 4
#define TABLE_IQ1 5

#if NUMBER_TABLE == TABLE_IQ4
#define TABLE_LOW 0x766a5d4f3f2d1801ul
#define TABLE_HIGH 0xf1d9c5b5a6998d81ul
#elif NUMBER_TABLE == TABLE_IQ3_S
#define TABLE_LOW 0x7f7d7b7977757371ul
#define TABLE_HIGH 0x8f8d8b8987858381ul
#elif NUMBER_TABLE == TABLE_IQ3_XXS
#define TABLE_LOW 0x7c746c645c544c42ul
#define TABLE_HIGH 0xbeb4aca49c948c84ul
#elif NUMBER_TABLE == TABLE_IQ2
#define TABLE_LOW 0x5588ab9988786755ul
#elif NUMBER_TABLE == TABLE_IQ1
#define TABLE_LOW 0x89778987817f7977ul
#endif
#ifndef TABLE_HIGH
#define TABLE_HIGH TABLE_LOW  // codes of 3 bits
#endif

inline int table_number(const uchar code) { return (int)((code < 8 ? TABLE_LOW : TABLE_HIGH) >> 8 * (code & 7) & 255); }

// A word of four times entry i; 255 in each byte where a bit of the code is set; a choice between two entries, four and eight.
#define ENTRY_OF(table, i) ((uint)((table) >> 8 * (i) & 255) * 0x01010101u)
#define BIT_OF(codes, bit) ((codes) >> (bit) & 0x01010101u)
#define MASK_OF(codes, bit) ((BIT_OF(codes, bit) << 8) - BIT_OF(codes, bit))
#define CHOOSE_OF_2(table, i) bitselect(ENTRY_OF(table, i), ENTRY_OF(table, (i) + 1), first)
#define CHOOSE_OF_4(table, i) bitselect(CHOOSE_OF_2(table, i), CHOOSE_OF_2(table, (i) + 2), second)
#define CHOOSE_OF_8(table) bitselect(CHOOSE_OF_4(table, 0), CHOOSE_OF_4(table, 4), third)

// Looks up the code in each byte; bits above the code may hold anything.
inline uint table_numbers(const uint codes) {
    const uint first = MASK_OF(codes, 0), second = MASK_OF(codes, 1), third = MASK_OF(codes, 2);
    if (TABLE_HIGH == TABLE_LOW) return CHOOSE_OF_8(TABLE_LOW);
    return bitselect(CHOOSE_OF_8(TABLE_LOW), CHOOSE_OF_8(TABLE_HIGH), MASK_OF(codes, 3));
}
