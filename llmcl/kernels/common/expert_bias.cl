// Expert biases. With BIAS, a kernel has the argument `bias`: float [experts of the layer][rows of an expert].
#ifndef BIAS
#define BIAS 0
#endif
#if BIAS
#define BIAS_PARAM , __global const float* bias
#define BIAS_ARG , bias
#else
#define BIAS_PARAM
#define BIAS_ARG
#endif
