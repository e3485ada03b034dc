// dot4(a, b, sum) = sum + a0 b0 + a1 b1 + a2 b2 + a3 b3 of the signed bytes of two words, as the device's instruction does it.
//
// Build: DOT, the form (portable/dot_product.py): DOT_KHR is cl_khr_integer_dot_product, which drivers declare in OpenCL C 3.0 alone
// and know in 1.2, too. Of its functions without a sum Intel's compiler makes calls. The others are clang's names for the
// instruction of AMD's GPUs up to RDNA 2, and since RDNA 3.
#define DOT_KHR 1
#define DOT_AMD 2
#define DOT_AMD_SINCE_RDNA3 3

#if DOT == DOT_KHR
int __attribute__((overloadable)) dot_acc_sat(char4 a, char4 b, int sum);
#define dot4(a, b, sum) dot_acc_sat(as_char4(a), as_char4(b), sum)
#elif DOT == DOT_AMD
#define dot4(a, b, sum) __builtin_amdgcn_sdot4(as_int(a), as_int(b), sum, false)
#elif DOT == DOT_AMD_SINCE_RDNA3
#define dot4(a, b, sum) __builtin_amdgcn_sudot4(true, as_int(a), true, as_int(b), sum, false)
#else
#error "portable/dot4.cl needs the build constant DOT, 1 to 3"
#endif
