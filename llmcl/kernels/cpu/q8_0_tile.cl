// Scores and values for attention_tile.cl on a CPU, with KV q8_0.
//
// With DOT > 0 the queries are also rounded to 8 bits, in groups of 32 dimensions with a scale each, like llama.cpp. The processor's
// 8-bit dot product (cpu/dot4.cl) takes 4 dimensions of 16 keys at once:
//   q . k[key] = sum over groups: s d[key] sum (q8 (k8 + 128) - 128 q8)        integers within a group, floats across groups
// With DOT 0 keys are widened to float32 and queries stay exact. Either way a key tile is read front to back, then the
// next: several streams at once are slower (notes/cpu.md).
//
// Build: constants for attention_tile.cl, and DOT.
#if !defined(DOT)
#error "cpu/q8_0_tile.cl needs the build constant DOT"
#endif

// Tiles are a multiple of 32 bytes, not of 64.
typedef uint key_vector __attribute__((ext_vector_type(16), aligned(32)));
inline uint16 key_bytes(__global const kv_t* tile, const int group, const int j) {
    return *(__global const key_vector*)(tile + group * KV_GROUP_SIZE + 32 + 64 * j);
}
inline float16 key_scales(__global const kv_t* tile, const int group) {
    return load16_f16((__global const f16_t*)(tile + group * KV_GROUP_SIZE));
}

#define AT_ONCE 1  // keys per output step

#if DOT
#define DOT_LARGEST 255
#include "cpu/dot4.cl"

inline void round_queries(attention_state* state) {
    for (int r = 0; r < ROWS; ++r) {
        for (int g = 0; g < KV_GROUPS; ++g) {
            const float* q = (const float*)state->q[r] + 32 * g;
            char* q8 = state->q8 + r * HEAD_DIM + 32 * g;
            const float scale = group_scale(q), inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
            int sum = 0;
            for (int j = 0; j < 32; ++j) {
                const int number = round_number(q[j] * inverse);
                q8[j] = (char)number;
                sum += number;
            }
            state->scale[r][g] = scale;
            state->offset[r][g] = -128 * sum;
        }
    }
}

inline void add_scores(const attention_state* state, __global const kv_t* k, const int r0, float16 (*s)[KEY_TILES],
                       const int tiles) {
#pragma nounroll
    for (int t = 0; t < tiles; ++t, k += KV_TILE) {
        float16 sum[SCORE_ROWS];
#pragma unroll
        for (int r = 0; r < SCORE_ROWS; ++r) sum[r] = s[r][t];
        for (int g = 0; g < KV_GROUPS; ++g) {
            int16 products[SCORE_ROWS];
            short32 pairs;
#pragma unroll
            for (int r = 0; r < SCORE_ROWS; ++r) products[r] = (int16)(DOT_IS_SIGNED ? 0 : state->offset[r0 + r][g]);
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                const uint16 key = key_bytes(k, g, j);
#pragma unroll
                for (int r = 0; r < SCORE_ROWS; ++r)
                    add4(&products[r], &pairs, key, ((const int*)(state->q8 + (r0 + r) * HEAD_DIM))[8 * g + j], 0, 1);
            }
            const float16 d = key_scales(k, g);
#pragma unroll
            for (int r = 0; r < SCORE_ROWS; ++r) sum[r] += CONVERT16(products[r], float) * (d * state->scale[r0 + r][g]);
        }
#pragma unroll
        for (int r = 0; r < SCORE_ROWS; ++r) s[r][t] = sum[r];
    }
}
#else
inline void round_queries(attention_state* state) {}

inline void add_scores(const attention_state* state, __global const kv_t* k, const int r0, float16 (*s)[KEY_TILES],
                       const int tiles) {
#pragma nounroll
    for (int t = 0; t < tiles; ++t, k += KV_TILE) {
        float16 sum[SCORE_ROWS];
#pragma unroll
        for (int r = 0; r < SCORE_ROWS; ++r) sum[r] = s[r][t];
        for (int g = 0; g < KV_GROUPS; ++g) {
            const float16 d = key_scales(k, g);
            for (int j = 0; j < 8; ++j) {
                const uint16 bytes = key_bytes(k, g, j);
#pragma unroll
                for (int b = 0; b < 4; ++b) {
                    const float16 key = CONVERT16(as_int16(bytes >> (8 * b) & 0xffu) - 128, float) * d;
#pragma unroll
                    for (int r = 0; r < SCORE_ROWS; ++r)
                        sum[r] += key * ((const float*)state->q[r0 + r])[32 * g + 4 * j + b];
                }
            }
        }
#pragma unroll
        for (int r = 0; r < SCORE_ROWS; ++r) s[r][t] = sum[r];
    }
}
#endif

// The numbers in 16 columns of value j, and the scales of 16 values.
inline float16 value16(__global const kv_t* tiles, const int j, const int column) {
    __global const kv_t* tile = tiles + j / 16 * KV_TILE + 32 * KV_GROUPS;
    return CONVERT16(*(__global const char16*)(tile + j % 16 * HEAD_DIM + column), float);
}
inline float16 value_scales(__global const kv_t* tiles, const int t, const int group) {
    return load16_f16((__global const f16_t*)(tiles + t * KV_TILE) + 16 * group);
}

#define SLICE_GROUPS (SLICE % 2 ? SLICE / 2 + 1 : SLICE / 2)  // 32-column groups that a slice touches

// As in float_tile.cl; value scales are folded into the weights, once for all columns in a group.
IN_REGISTERS inline void multiply_values(const attention_state* state, __global const kv_t* v,
                                         const weight_vector (*p)[KEY_TILES], const int r0, const int c,
                                         const int n_keys, float16 (*acc)[SLICE]) {
    float16 scaled[SLICE_GROUPS][VALUE_ROWS][KEY_TILES];
    for (int g = 0; g < SLICE_GROUPS; ++g) {
        for (int t = 0; 16 * t < n_keys; ++t) {
            const float16 d = value_scales(v, t, min(c / 2 + g, KV_GROUPS - 1));
#pragma unroll
            for (int r = 0; r < VALUE_ROWS; ++r) scaled[g][r][t] = p[r0 + r][t] * d;
        }
    }
    for (int j = 0; j < n_keys; ++j) {
        float16 value[SLICE];
#pragma unroll
        for (int i = 0; i < SLICE; ++i) value[i] = value16(v, j, (c + i) * 16);
#pragma unroll
        for (int r = 0; r < VALUE_ROWS; ++r)
#pragma unroll
            for (int i = 0; i < SLICE; ++i)
                acc[r][i] += value[i] * ((const float*)scaled[(c + i) / 2 - c / 2][r])[j];
    }
}

inline void add_last_values(attention_state* state, __global const kv_t* v, const weight_vector* p, const int row, const int first,
                            const int end) {
    for (int j = first; j < end; ++j) {
        for (int c = 0; c < COLUMNS; ++c) {
            const float16 d = value_scales(v, j / 16, c / 2);
            state->acc[row][c] += value16(v, j, c * 16) * (((const float*)p)[j] * ((const float*)&d)[j % 16]);
        }
    }
}
