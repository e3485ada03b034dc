// Stores the device address of `buffer`, which stays constant, in addresses[i]. Index space: a single work-item.

__kernel __attribute__((reqd_work_group_size(1, 1, 1)))
void store_address(__global ulong* addresses, const int i, __global void* buffer) {
    addresses[i] = (ulong)buffer;
}
