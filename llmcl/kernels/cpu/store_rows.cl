// The epilogue of 16 rows of a product on a CPU: out[row ...] = y or += y, rows from N on left out.
// Build: N, EPILOGUE, OUT_STRIDE where rows of several tokens follow each other: only multiples of 16 keep them aligned.
#ifdef OUT_STRIDE
#define ROWS_ALIGNED (OUT_STRIDE % 16 == 0)
#else
#define ROWS_ALIGNED 1
#endif

inline void store_rows(float16 y, __global float* out, int row) {
    if (ROWS_ALIGNED && row + 16 <= N) {
#if EPILOGUE == EPILOGUE_ADD
        y += load16_f32(out + row);
#endif
        store16_f32(y, out + row);
    } else {
        float16 rows = y;
        for (int i = 0; i < 16 && row + i < N; ++i) {
#if EPILOGUE == EPILOGUE_ADD
            ((float*)&rows)[i] += out[row + i];
#endif
            out[row + i] = ((float*)&rows)[i];
        }
    }
}
