/* attention_cudnn.cpp - attention through cuDNN's fused kernels (SDPA graphs), by its
 * header-only C++ frontend; libcudnn is opened at run time.
 *
 * math    as in ops.h; bf16 in and out, fp32 softmax; dK and dV leave cuDNN in bf16 (one
 *         rounding) and are added to fp32 dkv by us.
 * shapes  K and V are strided views of the interleaved kv rows, nothing is gathered. Two graphs:
 *         known          n documents of as many rows each, a batch: [n, heads, T/n, d] on [n,
 *                        kv_heads, T/n, d] (with n = 1: row0+T keys), causal (aligned at the bottom
 *                        right); log-sum-exp is [n, heads, T/n] there and transposed by us (before
 *                        9.26 the backward pass reads no other layout);
 *         found          ragged ("THD"): a batch of ps_att_max_documents(), lengths and offsets
 *                        found on the device from doc_start (ps_att_find_documents); log-sum-exp is
 *                        written and read as [T, heads] in place.
 * scratch documents, dK and dV in bf16 (4*(row0+T)*kv_heads*d bytes), transposed log-sum-exp,
 *         cuDNN's own workspace (fp32 dQ, and dK and dV of every query head): linear in T; cuDNN's
 *         deterministic backward needs T*(row0+T)*heads*2 bytes before 9.25.
 * time    H200, cuDNN 9.19, 32/8 heads of 128, TFLOP/s forward / backward: 8192 rows 618 / 502
 *         (deterministic 617 / 445), found on the device 563 / 466, after a prefix of 8192 627 /
 *         392, 2 x 8192 632 / 500 (found 594 / 461), 8 x 1024 448 / 278 (found 355 / 240), window
 *         4096 594 / 494, soft cap 460 / 439, both 463 / 407 (the log of 2026-11-21).
 * determinism  forward always; backward with exec->deterministic, else dQ is added with atomics.
 * reference    the cpu backend's, tests/native/test_cuda_attention.c */
#include "kernels/attention_documents.h"
#include "kernels/cuda/attention_cuda.h"
#include <atomic>
#include <dlfcn.h>
#include <math.h>
#include <mutex>
#include <stdlib.h>
#include <string.h>

/* The frontend would open libcudart.so for itself; it gets the one that is linked into us
 * instead. */
static char own_runtime;
static void *open_library(const char *name, int flags) {
  if (!strcmp(name, CUDART_VERSION >= 13000 ? "libcudart.so.13" : "libcudart.so.12"))
    return &own_runtime;
  return strncmp(name, "libcudart.so", 12) ? dlopen(name, flags) : NULL;
}
static void *find_symbol(void *library, const char *name) {
  if (library != &own_runtime)
    return dlsym(library, name);
#define OWN(f)                                                                                     \
  { #f, (void *)&f }
  static const struct {
    const char *name;
    void *fn;
  } own[] = {OWN(cudaGetDevice),
             OWN(cudaDeviceGetAttribute),
             OWN(cudaGetErrorString),
             OWN(cudaGetLastError),
             OWN(cudaMemcpyAsync),
             OWN(cudaMemsetAsync),
             OWN(cudaRuntimeGetVersion),
             OWN(cudaPointerGetAttributes),
             OWN(cudaStreamIsCapturing),
             OWN(cudaStreamGetCaptureInfo),
#if CUDART_VERSION < 13000
             OWN(cudaStreamGetCaptureInfo_v2),
#endif
             OWN(cudaThreadExchangeStreamCaptureMode),
             OWN(cudaStreamSynchronize),
             OWN(cudaMalloc),
             OWN(cudaFree)};
#undef OWN
  for (const auto &o : own)
    if (!strcmp(o.name, name))
      return o.fn;
  return NULL;
}
#define NV_CUDNN_FRONTEND_USE_DYNAMIC_LOADING
#define dlopen open_library
#define dlsym  find_symbol
#include <cudnn_frontend.h>
#undef dlopen
#undef dlsym

namespace cudnn_frontend {
void *cudnn_dlhandle = nullptr;
}
namespace fe = cudnn_frontend;

enum { MIN_VERSION = 91600, LINEAR_DETERMINISTIC = 92500, MAX_DEVICES = 64 };
/* Names of the tensors; a launch hands over addresses in this order, of those that its graph
 * has. */
enum uid : int64_t {
  Q = 1,
  K,
  V,
  O,
  LSE,
  DO,
  DQ,
  DK,
  DV,
  LEN_Q,
  LEN_KV,
  OFF_Q,
  OFF_KV,
  OFF_DKV,
  OFF_LSE
};

static std::mutex lock; /* over opening and building; launches do not take it */
static cudnnHandle_t handles[MAX_DEVICES];

struct plan {
  fe::graph::Graph graph;
  cudnnHandle_t handle;
  uint32_t known;                           /* documents; 0: they are found */
  uint32_t max_documents;                   /* for documents that are found */
  size_t documents, lse, dk, dv, workspace; /* offsets in scratch */
};

/* ---- opening --------------------------------------------------------------------------------- */

static const char *open_cudnn(void) {
  const std::lock_guard<std::mutex> hold(lock);
  if (fe::cudnn_dlhandle)
    return NULL;
  const char *named = getenv("PENSTOCK_CUDNN");
  void *library = dlopen(named ? named : "libcudnn.so.9", RTLD_NOW | RTLD_GLOBAL);
  if (!library)
    return "libcudnn.so.9 was not found";
  const auto version = (size_t (*)(void))dlsym(library, "cudnnGetVersion");
  if (!version || version() < MIN_VERSION)
    return "cuDNN is older than 9.16";
  fe::cudnn_dlhandle = library;
  return NULL;
}

/* A batch of single rows is left to the other graph. */
static uint32_t known_documents(const ps__args_attention *a) {
  const uint32_t n = ps__attention_documents(a);
  return n == a->n_tokens ? 0 : n;
}

static const char *refuses(const ps_att_shape *s) {
  const ps__args_attention *a = &s->args;
  const uint64_t width =
      (uint64_t)a->head_dim * (a->n_heads > 2 * a->n_kv_heads ? a->n_heads : 2 * a->n_kv_heads);
  const char *closed = open_cudnn();
  if (closed)
    return closed;
  if (s->device >= MAX_DEVICES)
    return "the device's number is too high";
  if (a->n_tokens < 2)
    return "one row is left to the plain kernels";
  if (a->head_dim % 8 || a->head_dim > (s->sm / 10 == 9 ? 256u : 128u))
    return "head_dim is no multiple of 8, or too large for this GPU";
  if (known_documents(a))
    return NULL;
  if (!ps__cudnn_finds_documents((uint32_t)s->sm))
    return "documents that are found on the device need compute capability 9.0 or 10.0 (or set one "
           "document a sequence)";
  if ((a->row0 + a->n_tokens) * width > INT32_MAX)
    return "the group has too many elements for offsets of 32 bits";
  if (s->backward && s->deterministic && s->sm / 10 == 9 &&
      fe::detail::get_backend_version() < LINEAR_DETERMINISTIC)
    return "deterministic, documents that are found on the device need cuDNN 9.25 or newer (or set "
           "one document a sequence)";
  return NULL;
}

/* ---- graphs ---------------------------------------------------------------------------------- */

using tensor = std::shared_ptr<fe::graph::Tensor_attributes>;

static tensor index_tensor(plan *p, const char *name, uid id, int64_t n) {
  return p->graph.tensor(fe::graph::Tensor_attributes()
                             .set_name(name)
                             .set_uid(id)
                             .set_dim({n, 1, 1, 1})
                             .set_stride({1, 1, 1, 1})
                             .set_data_type(fe::DataType_t::INT32));
}

/* What both graphs are made of: tensors as [batch, heads, rows, d] views of row-major matrices
 * with ld elements a row. */
struct operands {
  int64_t batch, rows, keys, d, heads, kv_heads;
  bool square;    /* every document has as many keys as query rows */
  int64_t window; /* 0: none */
  float scale, softcap;
  tensor len_q, len_kv, off_q, off_kv, off_dkv, off_lse;
  void shape(tensor t, int64_t h, int64_t n, int64_t ld, tensor off) const {
    t->set_dim({batch, h, n, d}).set_stride({n * ld, d, ld, 1});
    if (off)
      t->set_ragged_offset(off);
  }
  tensor input(plan *p, const char *name, uid id, int64_t h, int64_t n, int64_t ld,
               tensor off) const {
    tensor t = p->graph.tensor(fe::graph::Tensor_attributes()
                                   .set_name(name)
                                   .set_uid(id)
                                   .set_dim({batch, h, n, d})
                                   .set_stride({n * ld, d, ld, 1}));
    if (off)
      t->set_ragged_offset(off);
    return t;
  }
  void output(tensor t, uid id, int64_t h, int64_t n, int64_t ld, tensor off) const {
    t->set_output(true).set_uid(id);
    shape(t, h, n, ld, off);
  }
  /* [T, heads] of documents that are found, else [heads, rows] of each */
  void stats(tensor t) const {
    t->set_dim({batch, heads, rows, 1}).set_data_type(fe::DataType_t::FLOAT);
    if (off_lse)
      t->set_stride({rows * heads, 1, heads, 1}).set_ragged_offset(off_lse);
    else
      t->set_stride({rows * heads, rows, 1, 1});
  }
};

static operands describe(plan *p, const ps_att_shape *s) {
  const ps__args_attention *a = &s->args;
  operands x{};
  x.batch = p->known ? p->known : p->max_documents;
  x.rows = p->known ? a->n_tokens / p->known : a->n_tokens;
  x.keys = a->row0 + x.rows;
  x.d = a->head_dim;
  x.square = a->row0 == 0;
  x.window = ps_att_window(a);
  x.scale = ps__attention_scale(a);
  x.softcap = a->softcap;
  x.heads = a->n_heads;
  x.kv_heads = a->n_kv_heads;
  if (p->max_documents) {
    x.len_q = index_tensor(p, "len_q", LEN_Q, x.batch);
    x.len_kv = index_tensor(p, "len_kv", LEN_KV, x.batch);
    x.off_q = index_tensor(p, "off_q", OFF_Q, x.batch + 1);
    x.off_kv = index_tensor(p, "off_kv", OFF_KV, x.batch + 1);
    x.off_lse = index_tensor(p, "off_lse", OFF_LSE, x.batch + 1);
    if (s->backward)
      x.off_dkv = index_tensor(p, "off_dkv", OFF_DKV, x.batch + 1);
  }
  return x;
}

/* Of square masks both alignments are the same, and cuDNN is faster with the top left one. */
static fe::DiagonalAlignment_t alignment_of(const operands &x) {
  return x.square ? fe::DiagonalAlignment_t::TOP_LEFT : fe::DiagonalAlignment_t::BOTTOM_RIGHT;
}

/* What forward and backward options have in common. A left bound of n keeps n keys, the query's
 * own included. */
template <typename options> static void causal(options &o, const operands &x) {
  o.set_attn_scale(x.scale);
  o.set_diagonal_alignment(alignment_of(x));
  o.set_diagonal_band_right_bound(0);
  if (x.window)
    o.set_diagonal_band_left_bound((int)x.window);
  if (x.len_q)
    o.set_padding_mask(true).set_seq_len_q(x.len_q).set_seq_len_kv(x.len_kv);
}

/* The frontend takes a modifier of scores in place of masks, so this modifier masks too: softcap *
 * tanh(score / softcap), then -inf where the query does not see the key. There the gradient is 0
 * before the modifier's backward, which needs no mask. */
namespace modify = fe::graph::attn::score_modifiers;
using score_graph = std::shared_ptr<fe::graph::Graph>;
static tensor cap_tensor(const operands &x) {
  return std::make_shared<fe::graph::Tensor_attributes>(x.softcap);
}

/* Returns the tensors of the forward pass that the backward pass needs. */
template <typename options>
static std::shared_ptr<modify::Softcap> soft_cap(options &o, const operands &x) {
  const auto cap = std::make_shared<modify::Softcap>();
  o.set_attn_scale(x.scale);
  o.set_score_mod([cap, x](score_graph graph, tensor score) {
    const std::optional<int64_t> left = x.window ? std::optional<int64_t>(x.window) : std::nullopt;
    score = cap->forward(graph, score, cap_tensor(x));
    if (x.len_q)
      score = modify::padding_mask(graph, score, x.len_kv, x.len_q);
    return modify::sliding_window_mask(graph, score, alignment_of(x), left, 0, x.rows, x.keys,
                                       x.len_q, x.len_kv, nullptr, nullptr);
  });
  if (x.len_q)
    o.set_seq_len_q(x.len_q).set_seq_len_kv(x.len_kv);
  return cap;
}

static void build_forward(plan *p, const operands &x) {
  const int64_t ld = x.heads * x.d, ldkv = 2 * x.kv_heads * x.d;
  auto options = fe::graph::SDPA_attributes().set_name("attention_fwd").set_generate_stats(true);
  if (x.softcap > 0.0f)
    soft_cap(options, x);
  else
    causal(options, x);
  auto [o, lse] = p->graph.sdpa(x.input(p, "q", Q, x.heads, x.rows, ld, x.off_q),
                                x.input(p, "k", K, x.kv_heads, x.keys, ldkv, x.off_kv),
                                x.input(p, "v", V, x.kv_heads, x.keys, ldkv, x.off_kv), options);
  x.output(o, O, x.heads, x.rows, ld, x.off_q);
  lse->set_output(true).set_uid(LSE);
  x.stats(lse);
}

static void build_backward(plan *p, const operands &x, bool deterministic) {
  const int64_t ld = x.heads * x.d, ldkv = 2 * x.kv_heads * x.d, lddkv = x.kv_heads * x.d;
  auto options = fe::graph::SDPA_backward_attributes()
                     .set_name("attention_bwd")
                     .set_deterministic_algorithm(deterministic);
  if (x.softcap > 0.0f) {
    const auto cap = soft_cap(options, x);
    options.set_score_mod_bprop([cap, x](score_graph graph, tensor gradient) {
      return cap->backward(graph, gradient, cap_tensor(x));
    });
  } else {
    causal(options, x);
  }
  if (x.len_q)
    options.set_max_total_seq_len_q(x.rows).set_max_total_seq_len_kv(x.keys);
  tensor lse = p->graph.tensor(fe::graph::Tensor_attributes()
                                   .set_name("lse")
                                   .set_uid(LSE)
                                   .set_dim({1, 1, 1, 1})
                                   .set_stride({1, 1, 1, 1}));
  x.stats(lse);
  auto [dq, dk, dv] =
      p->graph.sdpa_backward(x.input(p, "q", Q, x.heads, x.rows, ld, x.off_q),
                             x.input(p, "k", K, x.kv_heads, x.keys, ldkv, x.off_kv),
                             x.input(p, "v", V, x.kv_heads, x.keys, ldkv, x.off_kv),
                             x.input(p, "o", O, x.heads, x.rows, ld, x.off_q),
                             x.input(p, "do", DO, x.heads, x.rows, ld, x.off_q), lse, options);
  x.output(dq, DQ, x.heads, x.rows, ld, x.off_q);
  x.output(dk, DK, x.kv_heads, x.keys, lddkv, x.off_dkv);
  x.output(dv, DV, x.kv_heads, x.keys, lddkv, x.off_dkv);
}

static void lay_out(plan *p, const ps_att_shape *s, size_t *bytes) {
  const ps__args_attention *a = &s->args;
  const size_t one =
      ps_att_round(2 * ((size_t)a->row0 + a->n_tokens) * a->n_kv_heads * a->head_dim);
  size_t at = 0;
  p->documents = at;
  if (p->max_documents)
    at += ps_att_round(ps_att_documents_bytes(p->max_documents));
  p->lse = at;
  if (p->known)
    at += ps_att_round((size_t)a->n_tokens * a->n_heads * 4);
  p->dk = at;
  p->dv = at + one;
  if (s->backward)
    at += 2 * one;
  p->workspace = at;
  *bytes = at;
}

static ps_status build(const ps_att_shape *s, plan *p, size_t *scratch_bytes) {
  const char *op = s->backward ? "attention_bwd" : "attention_fwd";
  if (!handles[s->device] && fe::detail::create_handle(&handles[s->device]) != CUDNN_STATUS_SUCCESS)
    return ps__fail(PS_EDEVICE, "%s: cuDNN %zu did not start on device %d", op,
                    fe::detail::get_backend_version(), s->device);
  p->handle = handles[s->device];
  p->known = known_documents(&s->args);
  p->max_documents = p->known ? 0 : ps_att_max_documents(s->args.n_tokens);
  p->graph.set_io_data_type(fe::DataType_t::BFLOAT16)
      .set_intermediate_data_type(fe::DataType_t::FLOAT)
      .set_compute_data_type(fe::DataType_t::FLOAT);
  const operands x = describe(p, s);
  if (s->backward)
    build_backward(p, x, s->deterministic);
  else
    build_forward(p, x);
  /* From 9.25 this asks for the deterministic backward with linear workspace; read while the
   * graph is built and nowhere else. */
  const bool ask = s->backward && s->deterministic &&
                   setenv("CUDNN_FRONTEND_ATTN_DP_WORKSPACE_LIMIT", "0", 0) == 0;
  const fe::error_t e = p->graph.build(p->handle, {fe::HeurMode_t::A});
  if (ask)
    unsetenv("CUDNN_FRONTEND_ATTN_DP_WORKSPACE_LIMIT");
  int64_t workspace = 0;
  if (e.is_bad() || p->graph.get_workspace_size(workspace).is_bad())
    return ps__fail(PS_EDEVICE,
                    "%s: cuDNN %zu has no plan for %u rows at %u, %u/%u heads of %u: %.300s", op,
                    fe::detail::get_backend_version(), s->args.n_tokens, s->args.row0,
                    s->args.n_heads, s->args.n_kv_heads, s->args.head_dim, e.err_msg.c_str());
  lay_out(p, s, scratch_bytes);
  *scratch_bytes += ps_att_round((size_t)workspace);
  return PS_OK;
}

static ps_status prepare(const ps_att_shape *s, void **out, size_t *scratch_bytes) {
  const std::lock_guard<std::mutex> hold(lock);
  std::unique_ptr<plan> p;
  try {
    p.reset(new plan());
    const ps_status st = build(s, p.get(), scratch_bytes);
    if (st != PS_OK)
      return st;
  } catch (const std::bad_alloc &) {
    return ps__fail(PS_ENOMEM, "attention: no memory for a cuDNN plan");
  } catch (const std::exception &e) {
    return ps__fail(PS_EDEVICE, "attention: cuDNN failed while a plan was built: %.300s", e.what());
  }
  *out = p.release();
  return PS_OK;
}

/* ---- launches -------------------------------------------------------------------------------- */

/* Addresses in the order of enum uid, which is how the frontend takes them without building a
 * map. */
struct addresses {
  void *ptr[OFF_LSE];
  int n;
  void add(void *p) { ptr[n++] = p; }
};

static void bind_documents(addresses *at, const plan *p, int32_t *documents, bool backward) {
  for (int which = PS_ATT_LEN_Q; which < PS_ATT_N_ARRAYS; which++)
    if (which != PS_ATT_OFF_DKV || backward)
      at->add(ps_att_array(documents, p->max_documents, which));
}

static ps_status run(const ps_launch *l, const ps_att_shape *s, plan *p) {
  const ps__cuda_exec *exec = (const ps__cuda_exec *)l->exec;
  const ps__args_attention *a = &s->args;
  char *scratch = (char *)exec->scratch;
  int32_t *documents = p->max_documents ? (int32_t *)(scratch + p->documents) : NULL;
  float *lse = (float *)l->ptr[4];
  float *stats = p->max_documents ? lse : (float *)(scratch + p->lse);
  if (documents)
    ps_att_find_documents(exec->stream, a, (const int32_t *)l->ptr[2], p->max_documents, false,
                          documents);
  addresses at = {{l->ptr[0], l->ptr[1],
                   (char *)l->ptr[1] + 2 * (size_t)a->n_kv_heads * a->head_dim, l->ptr[3], stats},
                  5};
  if (s->backward) {
    at.add(l->ptr[5]);
    at.add(l->ptr[6]);
    at.add(scratch + p->dk);
    at.add(scratch + p->dv);
    if (!documents)
      ps_att_transpose(exec->stream, stats, lse, p->known, a->n_tokens / p->known, a->n_heads);
  }
  if (documents)
    bind_documents(&at, p, documents, s->backward);
  if (fe::detail::set_stream(p->handle, exec->stream) != CUDNN_STATUS_SUCCESS)
    return ps__fail(PS_EDEVICE, "attention: cuDNN refused the stream");
  const fe::error_t e = p->graph.execute(p->handle, at.ptr, at.n, scratch + p->workspace);
  if (e.is_bad())
    return ps__fail(PS_EDEVICE, "attention: the cuDNN launch failed: %.300s", e.err_msg.c_str());
  if (!s->backward) {
    if (documents)
      ps_att_plain_fwd(exec->stream, l, documents, exec->n_sms);
    else
      ps_att_transpose(exec->stream, lse, stats, p->known, a->n_heads, a->n_tokens / p->known);
    return PS_OK;
  }
  /* says whether to accumulate */
  const ps__args_attention *now = (const ps__args_attention *)l->args;
  ps_att_finish_dkv(exec->stream, now, documents, scratch + p->dk, scratch + p->dv, a->n_kv_heads,
                    (float *)l->ptr[7]);
  if (documents)
    ps_att_plain_bwd(exec->stream, l, documents, exec->n_sms);
  return PS_OK;
}

static ps_status launch(const ps_launch *l, const ps_att_shape *s, void *p) {
  try {
    return run(l, s, (plan *)p);
  } catch (const std::exception &e) {
    return ps__fail(PS_EDEVICE, "attention: the cuDNN launch failed: %.300s", e.what());
  }
}

uint32_t ps_att_cudnn_version(void) {
  return open_cudnn() ? 0 : (uint32_t)fe::detail::get_backend_version();
}

extern const ps_att_provider ps_att_cudnn = {"cudnn", refuses, prepare, launch};
