/* penstock/hosts.h - several hosts that train one model. Each runs one task: a process with an
 * engine and a copy of the model, which drives the host's GPUs or its CPUs. The tasks are numbered
 * from 0: their ranks. They talk over TCP, and a task that fails ends all of them. Gradients go
 * over NCCL or TCP (ps_hosts_choose()). */
#ifndef PENSTOCK_HOSTS_H
#define PENSTOCK_HOSTS_H
#include "status.h"
#include <stdint.h>
#ifdef __cplusplus
extern "C" {
#endif

enum { PS_MAX_HOSTS = 64, PS_MAX_ADDRESS = 256 };

/* Which task this one is, as its launcher says. */
typedef struct ps_hosts_task {
  uint32_t struct_bytes;        /* sizeof(ps_hosts_task) */
  uint32_t rank, n_hosts;       /* n_hosts 1: no launcher started it, or it is the only task */
  uint32_t port;                /* at which rank 0 listens */
  char address[PS_MAX_ADDRESS]; /* of rank 0's host: a name or a number */
} ps_hosts_task;

/* ps_hosts_task_find() - read what torchrun, srun or mpirun set in the environment: RANK and
 * WORLD_SIZE, SLURM_PROCID and SLURM_STEP_NUM_TASKS, OMPI_COMM_WORLD_RANK and _SIZE, or PMI_RANK
 * and PMI_SIZE. Rank 0 is at MASTER_ADDR and MASTER_PORT, or on the first host of the SLURM step.
 * @out  the caller has set its struct_bytes; untouched on error.
 * Errors: PS_EINVAL: several tasks on this host, no address, or a port or rank out of range. The
 *         message says what to type. */
PS_API ps_status ps_hosts_task_find(ps_hosts_task *out);

typedef struct ps_hosts ps_hosts;

/* What moves gradients between hosts. The bits of the sums are the same.
 * AUTO: NCCL where all tasks train on GPUs and can open the library, else TCP */
typedef enum ps_transport {
  PS_TRANSPORT_AUTO = 0,
  PS_TRANSPORT_NCCL,
  PS_TRANSPORT_TCP,
  PS_N_TRANSPORTS
} ps_transport;

typedef struct ps_hosts_config {
  uint32_t struct_bytes;  /* sizeof(ps_hosts_config) */
  uint32_t rank, n_hosts; /* this task's number, from 0; all of them, 2 to PS_MAX_HOSTS */
  uint32_t port;          /* at which rank 0 listens, 1 to 65535 */
  const char *address;    /* of rank 0: a name or a number. Borrowed for the call */
  double wait_s;          /* how long to wait for the other tasks */
  /* What all tasks know and nobody else does: 16 to 1024 bytes. NULL: what the environment's
   * PENSTOCK_HOSTS_SECRET says, or the file that PENSTOCK_HOSTS_SECRET_FILE names, without white
   * space at its end; where neither is set, there is none. Borrowed for the call */
  const char *secret;
  /* Where rank 0 listens, where that is not @address: NULL: PENSTOCK_HOSTS_LISTEN of the
   * environment, or @address. "0.0.0.0" is all IPv4 addresses, "::" all IPv6 addresses. Borrowed
   * for the call */
  const char *listen;
  uint32_t insecure; /* 1: no secret is needed, whoever may reach rank 0 */
} ps_hosts_config;

/* ps_hosts_open() - meet the other tasks: rank 0 listens at cfg->port, the others connect to
 * cfg->address. Rank 0 listens at the addresses of that name that are its host's, and at all
 * addresses where the name is the loopback on its own host but is neither "localhost" nor a number.
 *
 * On each connection both sides prove that they know the secret (HMAC-SHA-256 of random numbers of
 * both). Whoever cannot is hung up on, and the tasks go on waiting for each other. Without a secret
 * all that speak as tasks do are taken for tasks; that is allowed where cfg->address is the
 * loopback, whose users are those of one host, or with cfg->insecure. The secret keeps out
 * everybody who can connect and does not know it. Nothing is encrypted, and what follows the
 * greeting proves nothing: who can read the packets reads gradients and data's hashes, and who can
 * change packets can change what is trained. The tasks trust each other.
 * @out     on PS_OK owned by the caller, released by ps_hosts_close(); untouched on error.
 * Threads: one thread at a time uses a ps_hosts, ps_hosts_fail() apart.
 * Blocks:  until all tasks have come, at most cfg->wait_s. After 3 s a line of PS_LOG_INFO says
 *          once for whom it waits, and where. Who is hung up on is logged, each reason once.
 * Later:   a task whose process says nothing for 10 s, while this one waits for it, is logged at
 *          PS_LOG_WARN. Until the first step of a training it ends all tasks after cfg->wait_s.
 * Errors:  PS_EINVAL: a field; there is no secret, or rank 0 has another one; the address is not
 *          rank 0's; the tasks are of different versions or numbers. PS_EIO: nobody answers, a task
 *          does not come in time, or the port is taken. PS_ENOMEM, PS_EDEVICE. */
PS_API ps_status ps_hosts_open(ps_hosts **out, const ps_hosts_config *cfg);
/* ps_hosts_close() - leave the others, who may go on. NULL is a no-op. */
PS_API void ps_hosts_close(ps_hosts *h);

/* Calls that all tasks make in the same order. They block until the others make them too. Their
 * errors are the same in all tasks: that of ps_hosts_fail() in one, or PS_EIO where a task has
 * ended or its network has failed. The message names the rank.
 * ps_hosts_share() - all tasks get the @bytes of rank 0.
 * ps_hosts_agree() - compare @text, lines of "key = value", with that of rank 0. PS_EINVAL: the
 * first line that differs, and whose it is. */
PS_API ps_status ps_hosts_share(ps_hosts *h, void *data, uint64_t bytes);
PS_API ps_status ps_hosts_agree(ps_hosts *h, const char *text);

/* ps_hosts_choose() - agree on what moves gradients; TCP where it is not called. A call that all
 * tasks make, like those above, before they plan: NCCL takes device memory.
 * @wanted    ps_transport, the same in all tasks.
 * @on_gpu    whether this task trains on GPUs. NCCL is then opened: libnccl.so.2, or the file that
 *            the environment's PENSTOCK_NCCL names.
 * @out       PS_TRANSPORT_NCCL or PS_TRANSPORT_TCP.
 * Errors, the same in all tasks: PS_EINVAL: NCCL is wanted, and a task cannot have it. The message
 *            names the rank and the reason.
 * ps_hosts_transport_text() - a line that says what moves gradients and why, and once NCCL was
 * opened what it takes of the GPU. Borrowed until close. */
PS_API ps_status ps_hosts_choose(ps_hosts *h, uint32_t wanted, int on_gpu, uint32_t *out);
PS_API const char *ps_hosts_transport_text(const ps_hosts *h);

/* ps_hosts_stated() - the network's rate that machines' descriptions state. A call that all tasks
 * make, like those above.
 * @bytes_per_s  in: BYTES per second that this machine's description states, 0: none. out: the
 *               least stated one, 0: no task states one. The same in all tasks; untouched on error.
 * Errors: as above; PS_EINVAL. */
PS_API ps_status ps_hosts_stated(ps_hosts *h, double *bytes_per_s);

/* ps_hosts_measure() - the network's rate for plans: ps_hardware.link[PS_LINK_NETWORK]. A call that
 * all tasks make, like those above, after ps_hosts_choose() and before they plan. Sums of gradients
 * take the way that steps use, NCCL or TCP. The rate is what a task sends in one of them, 2 (n - 1)
 * / n times its bytes with n hosts, over the time of the slowest task.
 * @device          with NCCL: the first of the GPUs that will train. Else without effect.
 * @host_mem_bytes  cap of the process's host memory, 0: none.
 * @bytes_per_s     in: BYTES per second that this machine's description states, or that an earlier
 *                  start has measured; 0: none. Where a task gives a rate, nothing is measured, and
 *                  the least one counts. out: the rate, the same in all tasks; untouched on error.
 *                  Later calls give what the first one measured.
 * Takes up to 256 MiB of host memory meanwhile, less where the cap or the system of a task leaves
 * less, and 1 MiB at least. NCCL is opened, with the device memory that plans count for it. It
 * stays open: the next trainer of these hosts takes it over and closes it; without a trainer
 * ps_hosts_close() does. So measure the machine's other rates before.
 * Blocks: a second, longer where the rate is below 20 MB/s; with NCCL some seconds more.
 * Errors:  as above; PS_EINVAL; PS_EBUSY: a trainer uses @h, and nothing was measured before.
 *          PS_ENOMEM and PS_EDEVICE may be of this task alone: it then calls ps_hosts_fail(). */
PS_API ps_status ps_hosts_measure(ps_hosts *h, uint32_t device, uint64_t host_mem_bytes,
                                  double *bytes_per_s);

/* A rate that is measured anew at each start is another one each time. It may change the cut that a
 * plan finds, and so the bits of a run. So callers keep it: a file for each id and transport.
 *
 * ps_hosts_id() - whose network it is: the first 16 hex digits, in lower case, of the SHA-256 of
 * the machines' names (gethostname()) in the order of ranks, each with the NUL that ends it. A call
 * that all tasks make, like those above. Machines of the same names are taken for the same.
 * @out     16 digits and a NUL, the same in all tasks; untouched on error.
 * Errors:  as above; PS_EINVAL. */
enum { PS_HOSTS_ID_BYTES = 17 };
PS_API ps_status ps_hosts_id(ps_hosts *h, char out[PS_HOSTS_ID_BYTES]);

/* ps_hosts_rate_write() - replace the file at @path, as a whole, by one that has the rate, and make
 * the folders that it lacks. JSON:
 * layout, a number that a version has of its own where it measures otherwise, and
 * network_bytes_per_s; for people also transport, n_hosts, and machine, the name of this task's.
 * ps_hosts_rate_read() - its network_bytes_per_s, for ps_hosts_measure(). The keys for people do
 * not count.
 * No other task takes part.
 * @bytes_per_s, @out  BYTES per second, more than 0; out: untouched on error.
 * Errors: PS_EINVAL; PS_EIO: the file is not there, or the disk failed; PS_EFORMAT: it is not JSON,
 *         or has no such rate; PS_ESTATE: it has another layout, or none; PS_ENOMEM. */
PS_API ps_status ps_hosts_rate_write(const ps_hosts *h, double bytes_per_s, const char *path);
PS_API ps_status ps_hosts_rate_read(double *out, const char *path);

/* ps_hosts_fail() - end the other tasks: what they wait for fails with @status, and "rank 1
 * failed: " before @why. The first failure counts; later ones, and NULL, are no-ops.
 * Threads: any. Blocks: no. */
PS_API void ps_hosts_fail(ps_hosts *h, ps_status status, const char *why);

#ifdef __cplusplus
}
#endif
#endif
