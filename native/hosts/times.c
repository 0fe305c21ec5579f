/* times.c - how long tasks of several hosts are waited for. */
#include "hosts/hosts.h"

ps__times ps__hosts_times = {.beat_s = 2, .silent_s = 10, .greeting_s = 10};
