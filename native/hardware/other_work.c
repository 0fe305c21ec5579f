/* other_work.c - what other processes took of the CPUs while this machine was measured. */
#include "hardware/hardware_impl.h"
#include <sched.h>
#include <stdio.h>
#include <sys/resource.h>
#include <unistd.h>

ps__cpu_use ps__cpu_use_now(void) {
  ps__cpu_use u = {.at_s = (double)ps__now_ns() * 1e-9};
  FILE *f = fopen("/proc/stat", "re");
  cpu_set_t mine;
  const bool known = sched_getaffinity(0, sizeof mine, &mine) == 0;
  unsigned cpu;
  unsigned long long t[8]; /* user, nice, system, idle, iowait, irq, softirq, steal: ticks */
  char line[512];
  while (f && fgets(line, sizeof line, f)) {
    if (sscanf(line, "cpu%u %llu %llu %llu %llu %llu %llu %llu %llu", &cpu, &t[0], &t[1], &t[2],
               &t[3], &t[4], &t[5], &t[6], &t[7]) != 9 ||
        (known && !CPU_ISSET(cpu, &mine)))
      continue;
    u.all_s += (double)(t[0] + t[1] + t[2] + t[5] + t[6] + t[7]) / (double)sysconf(_SC_CLK_TCK);
    u.n_cpus++;
  }
  if (f)
    fclose(f);
  struct rusage own;
  getrusage(RUSAGE_SELF, &own);
  u.own_s = (double)(own.ru_utime.tv_sec + own.ru_stime.tv_sec) +
            (double)(own.ru_utime.tv_usec + own.ru_stime.tv_usec) * 1e-6;
  return u;
}

uint32_t ps__other_work_percent(const ps__cpu_use *before) {
  enum { TOLERATED_PERCENT = 10 };
  const ps__cpu_use now = ps__cpu_use_now();
  const double s = (now.at_s - before->at_s) * now.n_cpus,
               others = now.all_s - before->all_s - (now.own_s - before->own_s),
               percent = s > 0 ? 100 * others / s : 0;
  return percent > TOLERATED_PERCENT ? (uint32_t)(percent < 100 ? percent : 100) : 0;
}
