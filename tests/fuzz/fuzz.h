/* fuzz.h - what the fuzz targets share: the input as a file, for functions that read one. */
#pragma once
#include <penstock/status.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

static char fuzz_folder[64];
static char fuzz_path[128];
static inline void fuzz_remove(void) {
  unlink(fuzz_path);
  rmdir(fuzz_folder);
}

/* The input in a file called @name, in a folder of this process that goes when the process does. */
static inline const char *fuzz_file(const char *name, const uint8_t *data, size_t bytes) {
  if (!fuzz_folder[0]) {
    snprintf(fuzz_folder, sizeof fuzz_folder, "%s/penstock-fuzz-XXXXXX",
             access("/dev/shm", W_OK) ? "/tmp" : "/dev/shm");
    if (!mkdtemp(fuzz_folder))
      abort();
    snprintf(fuzz_path, sizeof fuzz_path, "%s/%s", fuzz_folder, name);
    atexit(fuzz_remove);
  }
  FILE *f = fopen(fuzz_path, "wb");
  if (!f || fwrite(data, 1, bytes, f) != bytes || fclose(f))
    abort();
  return fuzz_path;
}

/* A refusal must be a sentence: one line, and not empty. */
static inline void fuzz_check(ps_status st) {
  const char *said = ps_last_error();
  if (st != PS_OK && (!said || !*said || strchr(said, '\n')))
    abort();
}
