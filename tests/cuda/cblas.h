/* cblas.h - as much of CBLAS as the cpu backend uses, written plainly: so that the CUDA tests build where no BLAS is. */
#ifndef PS_TEST_CBLAS_H
#define PS_TEST_CBLAS_H
enum { CblasRowMajor = 101, CblasNoTrans = 111, CblasTrans = 112 };

static inline void openblas_set_num_threads(int n) { (void)n; }
static inline void cblas_sgemm(int order, int ta, int tb, int m, int n, int k, float alpha, const float *a, int lda, const float *b, int ldb,
                               float beta, float *c, int ldc) {
  (void)order;
  for (int i = 0; i < m; i++)
    for (int j = 0; j < n; j++) {
      double sum = 0.0;
      for (int x = 0; x < k; x++)
        sum += (double)a[ta == CblasTrans ? (long)x * lda + i : (long)i * lda + x] * b[tb == CblasTrans ? (long)j * ldb + x : (long)x * ldb + j];
      float *to = &c[(long)i * ldc + j];
      *to = (float)(alpha * sum + (beta != 0.0f ? (double)beta * *to : 0.0));
    }
}
#endif
