// out[i] = i + the dot product of the bytes in a[i] and b[i]: tests the device's dot4 (portable/dot4.cl).
// a, b  int [n], four signed bytes each     out  int [n]     Index space: n work-items. Build: DOT.
#include "portable/dot4.cl"

__kernel void dot4_probe(__global const int* a, __global const int* b, __global int* out) {
    const int i = get_global_id(0);
    out[i] = dot4(a[i], b[i], i);
}
