// The epilogue for 16 rows of a product on a CPU: out[row ...] = y or += y, skipping rows from n on.
// stride: distance between the rows of several tokens (only multiples of 16 keep rows aligned); 0: a single token.
// Build: EPILOGUE.
inline void store_rows(float16 y, __global float* out, const int row, const int n, const int stride) {
    if (stride % 16 == 0 && row + 16 <= n) {
#if EPILOGUE == EPILOGUE_ADD
        y += load16_f32(out + row);
#endif
        store16_f32(y, out + row);
    } else {
        float16 rows = y;
        for (int i = 0; i < 16 && row + i < n; ++i) {
#if EPILOGUE == EPILOGUE_ADD
            ((float*)&rows)[i] += out[row + i];
#endif
            out[row + i] = ((float*)&rows)[i];
        }
    }
}
