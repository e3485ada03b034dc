// addresses[i] = the address of `buffer` in the device's memory, where it stays. Index space: one work-item.

__kernel __attribute__((reqd_work_group_size(1, 1, 1)))
void store_address(__global ulong* addresses, const int i, __global void* buffer) {
    addresses[i] = (ulong)buffer;
}
