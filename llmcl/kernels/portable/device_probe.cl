// out[i] = exp(x[i]) + the sum of x over i's work-group + SALT: tests whether the driver compiles and runs a kernel.
// x, out  float [groups][16]. Index space: groups, local size 16. Local memory: 64 bytes.
// Build: SALT, a number for this driver and processor, to avoid a cached program from another machine's compiler.
#ifndef SALT
#error "device_probe.cl needs the build constant SALT"
#endif

__kernel __attribute__((reqd_work_group_size(16, 1, 1)))
void device_probe(__global const float* x, __global float* out) {
    __local float row[16];
    const int i = get_global_id(0), lid = get_local_id(0);
    row[lid] = x[i];
    barrier(CLK_LOCAL_MEM_FENCE);
    float sum = 0.0f;
    for (int j = 0; j < 16; ++j) sum += row[j];
    out[i] = exp(x[i]) + sum + SALT;
}
