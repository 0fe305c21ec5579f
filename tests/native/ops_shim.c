/* ops_shim.c - a shared object for tests/op_runs.py: runs one cpu kernel by
 * name, outside any engine, and hands out the table of cases. */
#include "kernels/cpu/cpu.h"
#include "core/vec.h"
#include "model/rope.h"
#include "op_cases.h"
#include <string.h>

/* Runs kernel @name on @n_threads threads. scratch is exactly what the kernel asks for, filled
 * with NaN, with guards behind each worker's part. A ps_status; PS_EINTERNAL when a guard was
 * written to. */
PS_API int ops_run(const char *name, const void *args, void **ptrs, int n_ptr, int n_threads) {
  const ps_kernel *kernel = ps__op_by_name(name);
  if (!kernel)
    return ps__fail(PS_EINVAL, "no kernel is called '%s'", name);
  enum { GUARD = 4096 };
  size_t need = ps__op_scratch(kernel, PS_BACKEND_CPU, args, NULL),
         each = ps__round_up(need, 64) + GUARD;
  ps__cpu_exec exec = {.scratch_bytes = each};
  void *scratch = NULL;
  PS_TRY(ps__map(&scratch, each * (size_t)n_threads, "scratch"));
  exec.scratch = scratch;
  memset(exec.scratch, 0xff, each * (size_t)n_threads);
  ps_status status = ps__pool_create(&exec.pool, (uint32_t)n_threads, "ops");
  if (status == PS_OK) {
    ps_launch launch = {.args = args, .ptr = ptrs, .n_ptr = (uint32_t)n_ptr, .exec = &exec};
    status = kernel->fn[PS_BACKEND_CPU](&launch);
    ps__pool_destroy(exec.pool);
  }
  for (int w = 0; w < n_threads && status == PS_OK; w++)
    for (size_t i = need; i < each; i++)
      if ((unsigned char)exec.scratch[(size_t)w * each + i] != 0xff) {
        status = ps__fail(PS_EINTERNAL, "%s wrote past its scratch: worker %d, byte %zu of %zu",
                          name, w, i, need);
        break;
      }
  ps__unmap(scratch, each * (size_t)n_threads);
  return status;
}

PS_API int ops_rope_table(ps__args_qkv *a, const ps_rope *r, uint32_t max_positions,
                          uint64_t seq_len) {
  return ps__rope_table(a, r, max_positions, seq_len);
}

PS_API const char *ops_error(void) { return ps_last_error(); }
PS_CLONES static void shim_exp(float *dst, const float *src, size_t n) {
  for (size_t i = 0; i < n; i += PS_LANES)
    ps__v_write(dst, PS_F32, i, n, ps__v_exp(ps__v_read(src, PS_F32, i, n, 0.0f)));
}
PS_API void ops_exp(float *dst, const float *src, size_t n) { shim_exp(dst, src, n); }
PS_API float ops_exp1(float x) { return ps__expf(x); }
PS_API void ops_f32_to_bf16(uint16_t *dst, const float *src, size_t n) {
  ps__convert(dst, PS_BF16, src, PS_F32, n);
}
PS_API uint16_t ops_f32_to_bf16_1(float x) { return ps__f32_to_bf16(x); }
PS_API void ops_bf16_to_f32(float *dst, const uint16_t *src, size_t n) {
  ps__convert(dst, PS_F32, src, PS_BF16, n);
}
/* Elements of e4m3 (0) or e5m2 (1). */
PS_API void ops_f32_to_fp8(int which, uint8_t *dst, const float *src, size_t n) {
  ps__dtypes[PS__E4M3 + which].from_f32(dst, src, n);
}
PS_API void ops_fp8_to_f32(int which, float *dst, const uint8_t *src, size_t n) {
  ps__dtypes[PS__E4M3 + which].to_f32(dst, src, n);
}
PS_API uint32_t ops_fp8_scale_bits(int which, uint32_t amax) {
  return ps__fp8_scale_bits(amax, (uint32_t)(PS__E4M3 + which));
}
PS_API int64_t ops_live(void) { return ps__live_allocations(); }

PS_API int ops_blas_ready(int n_threads) { return ps__cpu_blas_ready((uint32_t)n_threads); }

/* ---- the table of cases (op_cases.h) --------------------------------------------------------- */

/* The name of op @i, of entry @i, of the op whose gradient it is; NULL: none. */
PS_API const char *ops_name(uint32_t i) { return ps__op_at(i) ? ps__op_at(i)->name : NULL; }
PS_API const char *ops_entry(uint32_t i) {
  return i < n_op_table ? op_table[i].kernel->name : NULL;
}
PS_API const char *ops_entry_gradient_of(uint32_t i) {
  return op_table[i].gradient_of ? op_table[i].gradient_of->name : NULL;
}

typedef void (*case_fn)(const char *name, const void *args, uint32_t args_bytes,
                        const op_operand *operand, uint32_t n_operands);
static void hand_over(void *user, const op_case *c) {
  (*(case_fn *)user)(c->name, c->args, c->args_bytes, c->operand, c->n_operands);
}
PS_API void ops_cases(uint32_t i, uint32_t dt, int sizes, uint64_t seed, case_fn fn) {
  op_cases(i, dt, (op_sizes)sizes, seed, hand_over, &fn);
}
