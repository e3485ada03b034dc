// dot4(a, b, sum) = sum + a0 b0 + a1 b1 + a2 b2 + a3 b3 for the signed bytes in two words, with the device's instruction.
//
// Build: DOT, the form (portable/dot_product.py): DOT_KHR is cl_khr_integer_dot_product, declared by drivers only in OpenCL C 3.0
// but available in 1.2 too. (Intel's compiler turns the variants without a sum into calls.) The remaining forms are clang's builtins for
// AMD GPUs up to RDNA 2, and since RDNA 3.
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
