// Widens the two 16-bit values in a word to floats.
inline float2 widen_bf16(const uint w) { return (float2)(as_float(w << 16), as_float(w & 0xffff0000u)); }
inline float2 widen_f16(const uint w) { return vload_half2(0, (const half*)&w); }  // core, unlike half arithmetic
inline float4 widen4_bf16(const uint2 w) { return (float4)(widen_bf16(w.x), widen_bf16(w.y)); }
inline float4 widen4_f16(const uint2 w) { return (float4)(widen_f16(w.x), widen_f16(w.y)); }

// Four values in storage format: 16-bit values take half the registers of floats.
typedef float4 stored4_f32;
typedef uint2 stored4_bf16, stored4_f16;
inline float4 widen4_f32(const stored4_f32 w) { return w; }

// Loads four values from a naturally aligned address: one load, where vload4 may become four.
inline float4 four_f32(__global const f32_t* p) { return *(__global const float4*)p; }
inline float4 four_bf16(__global const bf16_t* p) { return widen4_bf16(*(__global const uint2*)p); }
inline float4 four_f16(__global const f16_t* p) { return widen4_f16(*(__global const uint2*)p); }
