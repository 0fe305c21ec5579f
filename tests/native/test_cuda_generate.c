/* test_generate.c on a GPU; where there is none it says so. */
#define main generate_main
#include "test_generate.c"
#undef main

int main(void) { return generate_main(2, (char *[]){"test_cuda_generate", "cuda", NULL}); }
