/* attention_standin.c - attention for AVX2 under the name of that for AVX-512, for test_golden.py.
 * AVX-512 adds in another order and so has other bits. Linked in its place, these functions make a
 * library of the same bits on every CPU with AVX2. */
#define ps__att_avx2 ps__att_avx512
#include "../../native/kernels/cpu/attention_avx2.c"
