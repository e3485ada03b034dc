// Rotates a head in vectors, and appends its key and value, on a CPU. After common/kv_cache.cl.

// Rotates x (rope_row.cl) into `to`, 8 pairs at a time.
inline void rotate_head(__global const float* x, __global const float* rope, float* to) {
    for (int i = 0; i < HEAD_DIM / 2; i += 8) {
        const float8 a = vload8(0, x + i), b = vload8(0, x + HEAD_DIM / 2 + i);
        const float8 c = vload8(0, rope + i), s = vload8(0, rope + HEAD_DIM / 2 + i);
        vstore8(a * c - b * s, 0, to + i);
        vstore8(b * c + a * s, 0, to + HEAD_DIM / 2 + i);
    }
}

// Stores a KV head's key k (rotated here) and value v as row i in their tiles.
inline void append_head(__global const float* k, __global const float* v, __global const float* rope,
                        __global kv_t* k_tiles, __global kv_t* v_tiles, const int i) {
    float16 x[HEAD_DIM / 16];
    rotate_head(k, rope, (float*)x);
    for (int d = 0; d < HEAD_DIM; d += KV_RUN) store_key(k_tiles, i, d, (const float*)x + d);
#if KV_QUANTIZED
    for (int c = 0; c < HEAD_DIM / 16; ++c) x[c] = load16_f32(v + 16 * c);
    for (int d = 0; d < HEAD_DIM; d += KV_RUN) store_value(v_tiles, i, d, (const float*)x + d);
#else
    for (int c = 0; c < HEAD_DIM; c += 16) CAT(store16_, KV)(load16_f32(v + c), v_tiles + i * HEAD_DIM + c);
#endif
}
