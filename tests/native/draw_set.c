/* draw_set.c - draw.c and the conversions of dtype.c for one instruction set, PS_SET. The Makefile
 * compiles this file for each set of PS_CLONES (core/vec.h): test_draw.c compares their bits. A
 * processor other than x86-64 has one set. */
#define JOIN(a, b)  a##b
#define NAME(a, b)  JOIN(a, b)
#define TEXT(x)     #x
#define STRING(x)   TEXT(x)
#define OF_SET(was) NAME(was##_, PS_SET)

/* names of external linkage: other than the library's and than those of other sets */
#define ps__draw_numbers  OF_SET(draw)
#define ps__dtypes        OF_SET(dtypes)
#define ps_dtype_bytes    OF_SET(dtype_bytes)
#define ps__dtype_of_file OF_SET(dtype_of_file)
#define ps__convert       OF_SET(convert)

#include "core/vec.h"
#undef PS_CLONES
#if defined(__x86_64__)
#  define PS_CLONES __attribute__((target(STRING(PS_SET))))
#else
#  define PS_CLONES
#endif
#include "core/dtype.c"
#include "train/draw.c"
