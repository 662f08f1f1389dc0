/* A driver's NVML as nvidia-ml-py calls it (nvml.h, API 12): units, error codes and handles as NVIDIA
 * documents them, over GPUs that exist only as numbers. A test sets what they do with driver_set()
 * and reads back every answer that was given with driver_answers().
 *
 * With -DOLD_DRIVER, a driver before 520: no nvmlDeviceGetCurrentClocksEventReasons, no GPM. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
  SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6,
  DRIVER_NOT_LOADED = 9, GPU_IS_LOST = 15,
};
enum { POWER, ENERGY, SM_CLOCK, MAX_SM_CLOCK, MEMORY_CLOCK, HEAT, REASONS, ERROR, MIG, GPM, FIELDS };
enum { GPUS = 4, ALL = -1, ANSWERS = 1 << 16, INSTANCE = 5 };

typedef struct { int gpu, slice; unsigned loading; } Handle;
typedef Handle *Device;
typedef unsigned long long u64;

/* Milliwatts, millijoules, MHz, degrees Celsius; UNSUPPORTED: the GPU does not tell. */
#define UNSUPPORTED (-1LL)
static long long state[GPUS][FIELDS];
static const char *names[GPUS];
static int gpus, initialized, is_loaded;
static unsigned loading;
static Handle handles[64][GPUS][2]; /* by loading of the driver, GPU, and slice of it */
static struct { int gpu, field; u64 value; } answers[ANSWERS];
static int answered;

/* What the test calls. */

void driver_load(int count) { gpus = count, is_loaded = 1, loading++; }
void driver_unload(void) { is_loaded = 0, initialized = 0; }
void driver_name(int gpu, const char *name) { names[gpu] = name; }
void driver_set(int gpu, int field, long long value) { state[gpu][field] = value; }
int driver_answers(void) { return answered; }
int driver_answer(int i, int *gpu, int *field, u64 *value) {
  if (i >= answered) return 0;
  *gpu = answers[i].gpu, *field = answers[i].field, *value = answers[i].value;
  return 1;
}

/* NVML. */

int nvmlInitWithFlags(unsigned flags) {
  (void)flags;
  if (!is_loaded) return DRIVER_NOT_LOADED;
  initialized++;
  return SUCCESS;
}
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
int nvmlShutdown(void) {
  if (!initialized) return UNINITIALIZED;
  initialized--;
  return SUCCESS;
}
const char *nvmlErrorString(int code) {
  switch (code) {
    case UNINITIALIZED: return "Uninitialized";
    case NOT_SUPPORTED: return "Not Supported";
    case NOT_FOUND: return "Not Found";
    case GPU_IS_LOST: return "GPU is lost";
    default: return "Unknown Error";
  }
}
int nvmlDeviceGetCount_v2(unsigned *count) {
  if (!initialized) return UNINITIALIZED;
  *count = gpus;
  return SUCCESS;
}

static int open_gpu(int gpu, int slice, Device *device) {
  Handle *handle = &handles[loading % 64][gpu][slice];
  *handle = (Handle){gpu, slice, loading};
  *device = handle;
  return SUCCESS;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, Device *device) {
  if (!initialized) return UNINITIALIZED;
  if (index >= (unsigned)gpus) return INVALID_ARGUMENT;
  return state[index][ERROR] ? (int)state[index][ERROR] : open_gpu(index, 0, device);
}
static void uuid_of(int gpu, int slice, char *text) {
  sprintf(text, "%s-%08x-1111-2222-3333-444455556666", slice ? "MIG" : "GPU", 0xa0b0c0d0 + 16 * gpu);
}
int nvmlDeviceGetHandleByUUID(const char *uuid, Device *device) {
  char text[96];
  if (!initialized) return UNINITIALIZED;
  for (int gpu = 0; gpu < gpus; gpu++)
    for (int slice = 0; slice < 2; slice++)
      if (uuid_of(gpu, slice, text), !strcmp(uuid, text)) return open_gpu(gpu, slice, device);
  return NOT_FOUND;
}

/* The state of a handle: those of an earlier loading of the driver are invalid. */
static int check(Device device) {
  if (!initialized) return UNINITIALIZED;
  if (!device || device->loading != loading) return INVALID_ARGUMENT;
  return state[device->gpu][ERROR];
}
int nvmlDeviceGetUUID(Device device, char *text, unsigned length) {
  int code = check(device);
  if (length < 96) return 7;
  if (code == SUCCESS) uuid_of(device->gpu, device->slice, text);
  return code;
}
int nvmlDeviceGetName(Device device, char *text, unsigned length) {
  int code = check(device);
  if (code == SUCCESS) snprintf(text, length, "%s", names[device->gpu]);
  return code;
}
int nvmlDeviceIsMigDeviceHandle(Device device, unsigned *is_mig) {
  int code = check(device);
  if (code == SUCCESS) *is_mig = device->slice;
  return code;
}
int nvmlDeviceGetMigMode(Device device, unsigned *current, unsigned *pending) {
  int code = check(device);
  if (code != SUCCESS) return code;
  if (state[device->gpu][MIG] == UNSUPPORTED) return NOT_SUPPORTED;
  *current = *pending = state[device->gpu][MIG];
  return SUCCESS;
}
int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(Device slice, Device *device) {
  int code = check(slice);
  if (code != SUCCESS) return code;
  return slice->slice ? open_gpu(slice->gpu, 0, device) : INVALID_ARGUMENT;
}

/* A number of a whole GPU: a slice of one has none. */
static int answer(Device device, int field, u64 *value) {
  int code = check(device);
  if (code != SUCCESS) return code;
  if (device->slice) return INVALID_ARGUMENT;
  if (state[device->gpu][field] == UNSUPPORTED) return NOT_SUPPORTED;
  if (field == ENERGY) state[device->gpu][ENERGY] += state[device->gpu][POWER]; /* for a second */
  *value = state[device->gpu][field];
  if (answered < ANSWERS) {
    answers[answered].gpu = device->gpu, answers[answered].field = field;
    answers[answered++].value = *value;
  }
  return SUCCESS;
}
static int answer_int(Device device, int field, unsigned *value) {
  u64 found = 0;
  int code = answer(device, field, &found);
  if (code == SUCCESS) *value = found;
  return code;
}
int nvmlDeviceGetPowerUsage(Device device, unsigned *mw) { return answer_int(device, POWER, mw); }
int nvmlDeviceGetTotalEnergyConsumption(Device device, u64 *mj) {
  return answer(device, ENERGY, mj);
}
int nvmlDeviceGetClockInfo(Device device, int type, unsigned *mhz) { /* 1: SM, 2: memory */
  if (type != 1 && type != 2) return INVALID_ARGUMENT;
  return answer_int(device, type == 1 ? SM_CLOCK : MEMORY_CLOCK, mhz);
}
int nvmlDeviceGetMaxClockInfo(Device device, int type, unsigned *mhz) {
  if (type != 1 && type != 2) return INVALID_ARGUMENT;
  return answer_int(device, type == 1 ? MAX_SM_CLOCK : MEMORY_CLOCK, mhz);
}
int nvmlDeviceGetTemperature(Device device, int sensor, unsigned *celsius) { /* 0: the GPU's */
  return sensor ? INVALID_ARGUMENT : answer_int(device, HEAT, celsius);
}
int nvmlDeviceGetCurrentClocksThrottleReasons(Device device, u64 *reasons) {
  return answer(device, REASONS, reasons);
}
int nvmlDeviceGetGpuInstanceId(Device device, unsigned *id) {
  int code = check(device);
  if (code != SUCCESS) return code;
  if (!device->slice) return INVALID_ARGUMENT;
  *id = INSTANCE;
  return SUCCESS;
}
#ifndef OLD_DRIVER
int nvmlDeviceGetCurrentClocksEventReasons(Device device, u64 *reasons) {
  return answer(device, REASONS, reasons);
}

/* GPM: counters since the driver was loaded, of a whole GPU and of its slice. A sample copies them; two
 * samples of the same GPU are a second and 2^30 cycles apart, and a metric is what they differ by. */

enum { METRICS = 98, CYCLES = 1 << 30 };
typedef struct { int gpu, slice; u64 seconds, counters[METRICS]; } Sample;
typedef struct {
  unsigned metric_id;
  int code;
  double value;
  struct { char *short_name, *long_name, *unit; } info;
} Metric;
typedef struct { unsigned version, count; Sample *begin, *end; Metric metrics[METRICS]; } Request;
typedef struct { unsigned version, is_supported; } Support;
static Sample now[GPUS][2];
static double rates[GPUS][2][METRICS]; /* percent, or MiB/s; below 0: not supported */
static int samples;

void driver_rate(int gpu, int slice, int metric, double rate) { rates[gpu][slice][metric] = rate; }
void driver_reset_counters(int gpu) {
  for (int slice = 0; slice < 2; slice++) memset(now[gpu][slice].counters, 0, METRICS * sizeof(u64));
}
int driver_samples(void) { return samples; }

static int is_rate(int metric) { return metric >= 20; } /* bytes; the first ones are percentages */
int nvmlGpmQueryDeviceSupport(Device device, Support *support) {
  int code = check(device);
  if (code != SUCCESS) return code;
  if (support->version != 1) return INVALID_ARGUMENT;
  support->is_supported = state[device->gpu][GPM] == 1;
  return SUCCESS;
}
int nvmlGpmSampleAlloc(Sample **sample) {
  *sample = calloc(1, sizeof(Sample)), samples++;
  return SUCCESS;
}
int nvmlGpmSampleFree(Sample *sample) {
  free(sample), samples--;
  return SUCCESS;
}
static int sample_of(Device device, int slice, Sample *sample) {
  int code = check(device), gpu = device ? device->gpu : 0;
  if (code != SUCCESS) return code;
  if (state[gpu][GPM] != 1) return NOT_SUPPORTED;
  if (state[gpu][MIG] == 1 && !slice) return NOT_SUPPORTED;
  Sample *counters = &now[gpu][slice];
  counters->gpu = gpu, counters->slice = slice, counters->seconds++;
  for (int i = 0; i < METRICS; i++)
    if (rates[gpu][slice][i] > 0)
      counters->counters[i] += rates[gpu][slice][i] * (is_rate(i) ? 1 << 20 : CYCLES / 100);
  *sample = *counters;
  return SUCCESS;
}
int nvmlGpmSampleGet(Device device, Sample *sample) { return sample_of(device, 0, sample); }
int nvmlGpmMigSampleGet(Device device, unsigned instance, Sample *sample) {
  return instance == INSTANCE ? sample_of(device, 1, sample) : INVALID_ARGUMENT;
}
int nvmlGpmMetricsGet(Request *request) {
  Sample *begin = request->begin, *end = request->end;
  if (request->version != 1 || request->count > METRICS) return INVALID_ARGUMENT;
  if (begin->gpu != end->gpu || begin->slice != end->slice || begin->seconds == end->seconds)
    return INVALID_ARGUMENT;
  for (unsigned i = 0; i < request->count; i++) {
    Metric *metric = &request->metrics[i];
    unsigned id = metric->metric_id;
    metric->code = id < METRICS && rates[end->gpu][end->slice][id] >= 0 ? SUCCESS : NOT_SUPPORTED;
    if (metric->code != SUCCESS) continue;
    double difference = (long long)(end->counters[id] - begin->counters[id]); /* below 0 after a reset */
    double seconds = end->seconds - begin->seconds;
    metric->value = difference / seconds / (is_rate(id) ? 1 << 20 : CYCLES / 100);
  }
  return SUCCESS;
}
#endif
