/* Copyright (c) dflash.launchproof contributors
 * GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
 * SPDX-License-Identifier: GPL-3.0-or-later
 *
 * Stands in for libnvidia-ml.so.1 and libcuda.so.1 in tests: what a driver would answer comes from a file, read anew at
 * each call, so that a test can change it under running programs. standin.py writes the file and explains its words.
 *
 * What is real: the prototypes (nvml.h), the device nodes (opened as the drivers open them, and their errno decides) and
 * the processes (one that makes a context here is listed until it ends).
 */
#define NVML_NO_UNVERSIONED_FUNC_DEFS
#include <errno.h>
#include <fcntl.h>
#include <nvml.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define MAX_GPUS 16
#define MAX_MIGS 8
#define MAX_PROCESSES 1024
#define MAX_ERRORS 32
#define RESERVED (600ull << 20) /* what the driver keeps for itself: in nvmlMemory_t's used, not in nvmlMemory_v2_t's */

struct device {
  char uuid[96], name[96];
  unsigned gpu, minor, util, power, temp, gi, ci;
  unsigned long long total, used;
  int mig, lost;
};
struct listed {
  unsigned gpu, pid, gi, ci;
  unsigned long long memory;
};
static struct {
  char driver[80], nvml[80];
  int init, cuinit, host_pids, nodes, gpus, migs, processes, errors;
  struct device gpu[MAX_GPUS], mig[MAX_GPUS * MAX_MIGS];
  struct listed process[MAX_PROCESSES];
  struct { char function[96]; int code; } error[MAX_ERRORS];
} state;

static const char *state_path(void) {
  const char *path = getenv("NVML_STANDIN");
  return path ? path : "/run/nvml-standin";
}

static const char *value(char **words, const char *key, const char *otherwise) {
  size_t length = strlen(key);
  for (; *words; words++)
    if (!strncmp(*words, key, length) && (*words)[length] == '=') return *words + length + 1;
  return otherwise;
}
static unsigned long long number(char **words, const char *key, unsigned long long otherwise) {
  const char *text = value(words, key, NULL);
  return text ? strtoull(text, NULL, 10) : otherwise;
}
static void copy(char *to, size_t size, const char *from) { snprintf(to, size, "%s", from); }

static void read_device(struct device *device, char **words, unsigned gpu, int mig) {
  memset(device, 0, sizeof *device);
  copy(device->uuid, sizeof device->uuid, value(words, "uuid", "GPU-none"));
  copy(device->name, sizeof device->name, value(words, "name", "Stand-in"));
  for (char *c = device->name; *c; c++)
    if (*c == '_') *c = ' ';
  device->gpu = gpu;
  device->minor = number(words, "minor", gpu);
  device->total = number(words, "total", 80ull << 30);
  device->used = number(words, "used", 0);
  device->util = number(words, "util", 0);
  device->power = number(words, "power", 90);
  device->temp = number(words, "temp", 40);
  device->gi = number(words, "gi", 0xFFFFFFFF);
  device->ci = number(words, "ci", 0xFFFFFFFF);
  device->lost = number(words, "lost", 0);
  device->mig = mig;
}

static void add_process(char **words) {
  struct listed one = {number(words, "gpu", 0), number(words, "pid", 0), number(words, "gi", 0xFFFFFFFF),
                       number(words, "ci", 0xFFFFFFFF), 0};
  const char *memory = value(words, "memory", "0");
  char path[64];
  snprintf(path, sizeof path, "/proc/%u", one.pid);
  if (number(words, "live", 0) && access(path, F_OK)) return;
  one.memory = *memory == '?' ? (unsigned long long)NVML_VALUE_NOT_AVAILABLE : strtoull(memory, NULL, 10);
  for (int i = 0; i < state.processes; i++)
    if (state.process[i].pid == one.pid && state.process[i].gpu == one.gpu && state.process[i].gi == one.gi) {
      state.process[i].memory += one.memory;
      return;
    }
  if (state.processes < MAX_PROCESSES) state.process[state.processes++] = one;
}

static void look(void) {
  char line[1024], *words[32], *rest;
  FILE *file = fopen(state_path(), "re");
  memset(&state, 0, sizeof state);
  copy(state.driver, sizeof state.driver, "580.159.04");
  if (!file) {
    state.init = state.cuinit = -1;
    return;
  }
  while (fgets(line, sizeof line, file)) {
    int count = 0;
    for (char *word = strtok_r(line, " \n", &rest); word && count < 31; word = strtok_r(NULL, " \n", &rest)) words[count++] = word;
    words[count] = NULL;
    if (!count || *words[0] == '#') continue;
    if (!strcmp(words[0], "driver")) copy(state.driver, sizeof state.driver, words[1]);
    else if (!strcmp(words[0], "init")) state.init = atoi(words[1]);
    else if (!strcmp(words[0], "cuinit")) state.cuinit = atoi(words[1]);
    else if (!strcmp(words[0], "pids")) state.host_pids = !strcmp(words[1], "host");
    else if (!strcmp(words[0], "nodes")) state.nodes = !strcmp(words[1], "checked");
    else if (!strcmp(words[0], "gpu") && state.gpus < MAX_GPUS) read_device(&state.gpu[state.gpus], words, state.gpus, 0), state.gpus++;
    else if (!strcmp(words[0], "mig") && state.migs < MAX_GPUS * MAX_MIGS)
      read_device(&state.mig[state.migs++], words, number(words, "gpu", 0), 1);
    else if (!strcmp(words[0], "process")) add_process(words);
    else if (!strcmp(words[0], "error") && state.errors < MAX_ERRORS) {
      copy(state.error[state.errors].function, 96, words[1]);
      state.error[state.errors++].code = atoi(words[2]);
    }
  }
  fclose(file);
  for (int i = 0; i < state.processes; i++)
    if (state.process[i].gpu < (unsigned)state.gpus && state.process[i].memory != (unsigned long long)NVML_VALUE_NOT_AVAILABLE)
      state.gpu[state.process[i].gpu].used += state.process[i].memory;
}

/* Handles are numbers, so that they outlive the state: GPU i is i + 1, MIG instance i is 1000 + i. */
static struct device *device_of(nvmlDevice_t handle) {
  uintptr_t number = (uintptr_t)handle;
  if (number >= 1000) return number - 1000 < (uintptr_t)state.migs ? &state.mig[number - 1000] : NULL;
  return number && number <= (uintptr_t)state.gpus ? &state.gpu[number - 1] : NULL;
}
static int mig_mode(const struct device *device) {
  for (int i = 0; i < state.migs; i++)
    if (state.mig[i].gpu == device->gpu) return 1;
  return 0;
}
static nvmlReturn_t failure(const char *function) {
  for (int i = 0; i < state.errors; i++)
    if (!strcmp(state.error[i].function, function)) return state.error[i].code;
  return NVML_SUCCESS;
}
/* Every call about a device begins with this. */
#define DEVICE(handle)                                      \
  look();                                                   \
  struct device *device = device_of(handle);                \
  if (!device) return NVML_ERROR_INVALID_ARGUMENT;          \
  if (device->lost) return NVML_ERROR_GPU_IS_LOST;          \
  if (failure(__func__)) return failure(__func__)
static nvmlReturn_t text(char *to, unsigned length, const char *from) {
  if (strlen(from) >= length) return NVML_ERROR_INSUFFICIENT_SIZE;
  strcpy(to, from);
  return NVML_SUCCESS;
}

/* NVML opens nvidiactl and each GPU's node; the errors are those that driver 580.159 was seen to make of the errno. */
static nvmlReturn_t open_nodes(void) {
  static int kept = -1;
  if (!state.nodes) return NVML_SUCCESS;
  if (kept < 0) kept = open("/dev/nvidiactl", O_RDWR | O_CLOEXEC);
  if (kept < 0)
    return errno == ENOENT || errno == ENXIO ? NVML_ERROR_DRIVER_NOT_LOADED
           : errno == EACCES                 ? NVML_ERROR_NO_PERMISSION
           : errno == EROFS                  ? NVML_ERROR_OPERATING_SYSTEM
                                             : NVML_ERROR_UNKNOWN;
  return NVML_SUCCESS;
}

nvmlReturn_t nvmlInitWithFlags(unsigned flags) {
  (void)flags;
  look();
  if (state.init < 0) return NVML_ERROR_DRIVER_NOT_LOADED;
  return state.init ? (nvmlReturn_t)state.init : open_nodes();
}
nvmlReturn_t nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
nvmlReturn_t nvmlShutdown(void) { return NVML_SUCCESS; }
const char *nvmlErrorString(nvmlReturn_t code) {
  switch (code) {
    case NVML_SUCCESS: return "Success";
    case NVML_ERROR_UNINITIALIZED: return "Uninitialized";
    case NVML_ERROR_INVALID_ARGUMENT: return "Invalid Argument";
    case NVML_ERROR_NOT_SUPPORTED: return "Not Supported";
    case NVML_ERROR_NO_PERMISSION: return "Insufficient Permissions";
    case NVML_ERROR_NOT_FOUND: return "Not Found";
    case NVML_ERROR_INSUFFICIENT_SIZE: return "Insufficient Size";
    case NVML_ERROR_DRIVER_NOT_LOADED: return "Driver Not Loaded";
    case NVML_ERROR_FUNCTION_NOT_FOUND: return "Function Not Found";
    case NVML_ERROR_GPU_IS_LOST: return "GPU is lost";
    case NVML_ERROR_OPERATING_SYSTEM: return "The operating system has blocked the request.";
    case NVML_ERROR_LIB_RM_VERSION_MISMATCH: return "Driver/library version mismatch";
    default: return "Unknown Error";
  }
}
nvmlReturn_t nvmlSystemGetDriverVersion(char *version, unsigned length) { look(); return text(version, length, state.driver); }
nvmlReturn_t nvmlSystemGetNVMLVersion(char *version, unsigned length) { look(); return text(version, length, state.driver); }
nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int *version) { *version = 13000; return NVML_SUCCESS; }
nvmlReturn_t nvmlSystemGetCudaDriverVersion(int *version) { *version = 13000; return NVML_SUCCESS; }
nvmlReturn_t nvmlDeviceGetCount_v2(unsigned *count) { look(); *count = state.gpus; return failure(__func__); }
nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned index, nvmlDevice_t *handle) {
  look();
  if (index >= (unsigned)state.gpus) return NVML_ERROR_INVALID_ARGUMENT;
  if (state.gpu[index].lost) return NVML_ERROR_GPU_IS_LOST;
  *handle = (nvmlDevice_t)(uintptr_t)(index + 1);
  return failure(__func__);
}
nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *handle) {
  look();
  for (int i = 0; i < state.gpus; i++)
    if (!strcmp(state.gpu[i].uuid, uuid)) return *handle = (nvmlDevice_t)(uintptr_t)(i + 1), NVML_SUCCESS;
  for (int i = 0; i < state.migs; i++)
    if (!strcmp(state.mig[i].uuid, uuid)) return *handle = (nvmlDevice_t)(uintptr_t)(1000 + i), NVML_SUCCESS;
  return NVML_ERROR_NOT_FOUND;
}
nvmlReturn_t nvmlDeviceGetHandleByPciBusId_v2(const char *bus, nvmlDevice_t *handle) {
  unsigned domain, number;
  if (sscanf(bus, "%x:%x:", &domain, &number) != 2 || !number) return NVML_ERROR_NOT_FOUND;
  return nvmlDeviceGetHandleByIndex_v2(number - 1, handle);
}
nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t handle, char *name, unsigned length) { DEVICE(handle); return text(name, length, device->name); }
nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t handle, char *uuid, unsigned length) { DEVICE(handle); return text(uuid, length, device->uuid); }
nvmlReturn_t nvmlDeviceGetIndex(nvmlDevice_t handle, unsigned *index) { DEVICE(handle); *index = device->gpu; return NVML_SUCCESS; }
nvmlReturn_t nvmlDeviceGetMinorNumber(nvmlDevice_t handle, unsigned *minor) { DEVICE(handle); *minor = device->minor; return NVML_SUCCESS; }
nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t handle, nvmlPciInfo_t *pci) {
  DEVICE(handle);
  memset(pci, 0, sizeof *pci);
  pci->bus = device->gpu + 1;
  snprintf(pci->busId, sizeof pci->busId, "%08X:%02X:00.0", 0u, pci->bus & 0xff);
  snprintf(pci->busIdLegacy, sizeof pci->busIdLegacy, "%04X:%02X:00.0", 0u, pci->bus & 0xff);
  return NVML_SUCCESS;
}
nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t handle, nvmlMemory_t *memory) {
  DEVICE(handle);
  memory->total = device->total;
  memory->used = device->used + RESERVED;
  memory->free = memory->total - memory->used;
  return NVML_SUCCESS;
}
nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t handle, nvmlMemory_v2_t *memory) {
  DEVICE(handle);
  if (memory->version != nvmlMemory_v2) return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
  memory->total = device->total;
  memory->reserved = RESERVED;
  memory->used = device->used;
  memory->free = memory->total - memory->used - memory->reserved;
  return NVML_SUCCESS;
}
nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t handle, nvmlUtilization_t *rates) {
  DEVICE(handle);
  if (device->mig) return NVML_ERROR_NOT_SUPPORTED;
  rates->gpu = rates->memory = device->util;
  return NVML_SUCCESS;
}
nvmlReturn_t nvmlDeviceGetPowerUsage(nvmlDevice_t handle, unsigned *power) { DEVICE(handle); *power = device->power * 1000; return NVML_SUCCESS; }
nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t handle, nvmlTemperatureSensors_t sensor, unsigned *temp) {
  DEVICE(handle);
  (void)sensor;
  *temp = device->temp;
  return NVML_SUCCESS;
}

static int is_on(const struct listed *process, const struct device *device) {
  return process->gpu == device->gpu && (!device->mig || (process->gi == device->gi && process->ci == device->ci));
}
#define FILL(...)                                                                          \
  DEVICE(handle);                                                                          \
  unsigned room = *count, found = 0;                                                       \
  for (int i = 0; i < state.processes; i++) {                                              \
    if (!is_on(&state.process[i], device)) continue;                                       \
    if (infos && found < room) {                                                           \
      infos[found].pid = state.process[i].pid;                                             \
      infos[found].usedGpuMemory = state.process[i].memory;                                \
      __VA_ARGS__                                                                          \
    }                                                                                      \
    found++;                                                                               \
  }                                                                                        \
  *count = found;                                                                          \
  return found > room ? NVML_ERROR_INSUFFICIENT_SIZE : NVML_SUCCESS
#define INSTANCES infos[found].gpuInstanceId = state.process[i].gi; infos[found].computeInstanceId = state.process[i].ci;
nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t handle, unsigned *count, nvmlProcessInfo_t *infos) { FILL(INSTANCES); }
nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v2(nvmlDevice_t handle, unsigned *count, nvmlProcessInfo_v2_t *infos) { FILL(INSTANCES); }
nvmlReturn_t nvmlDeviceGetComputeRunningProcesses(nvmlDevice_t handle, unsigned *count, nvmlProcessInfo_v1_t *infos) { FILL(); }
nvmlReturn_t nvmlDeviceGetGraphicsRunningProcesses_v3(nvmlDevice_t handle, unsigned *count, nvmlProcessInfo_t *infos) {
  DEVICE(handle);
  (void)infos;
  *count = 0;
  return NVML_SUCCESS;
}
nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t handle, unsigned *current, unsigned *pending) {
  DEVICE(handle);
  *current = *pending = mig_mode(device);
  return NVML_SUCCESS;
}
nvmlReturn_t nvmlDeviceGetMaxMigDeviceCount(nvmlDevice_t handle, unsigned *count) { DEVICE(handle); *count = mig_mode(device) ? MAX_MIGS : 0; return NVML_SUCCESS; }
nvmlReturn_t nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t handle, unsigned index, nvmlDevice_t *mig) {
  DEVICE(handle);
  for (int i = 0; i < state.migs; i++)
    if (state.mig[i].gpu == device->gpu && !index--) return *mig = (nvmlDevice_t)(uintptr_t)(1000 + i), NVML_SUCCESS;
  return NVML_ERROR_NOT_FOUND;
}
nvmlReturn_t nvmlDeviceIsMigDeviceHandle(nvmlDevice_t handle, unsigned *is) { DEVICE(handle); *is = device->mig; return NVML_SUCCESS; }
nvmlReturn_t nvmlDeviceGetDeviceHandleFromMigDeviceHandle(nvmlDevice_t handle, nvmlDevice_t *parent) { DEVICE(handle); *parent = (nvmlDevice_t)(uintptr_t)(device->gpu + 1); return NVML_SUCCESS; }
nvmlReturn_t nvmlDeviceGetGpuInstanceId(nvmlDevice_t handle, unsigned *id) { DEVICE(handle); *id = device->gi; return NVML_SUCCESS; }
nvmlReturn_t nvmlDeviceGetComputeInstanceId(nvmlDevice_t handle, unsigned *id) { DEVICE(handle); *id = device->ci; return NVML_SUCCESS; }

/* What monitors also ask, and these GPUs, like many virtual ones, do not have. */
#define NOT_SUPPORTED(name, ...) \
  nvmlReturn_t name(nvmlDevice_t handle, __VA_ARGS__) { DEVICE(handle); return NVML_ERROR_NOT_SUPPORTED; }
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-parameter"
NOT_SUPPORTED(nvmlDeviceGetEncoderUtilization, unsigned *utilization, unsigned *period)
NOT_SUPPORTED(nvmlDeviceGetDecoderUtilization, unsigned *utilization, unsigned *period)
NOT_SUPPORTED(nvmlDeviceGetFanSpeed, unsigned *speed)
NOT_SUPPORTED(nvmlDeviceGetPowerManagementLimit, unsigned *limit)
NOT_SUPPORTED(nvmlDeviceGetDisplayActive, nvmlEnableState_t *active)
NOT_SUPPORTED(nvmlDeviceGetDriverModel, nvmlDriverModel_t *current, nvmlDriverModel_t *pending)
NOT_SUPPORTED(nvmlDeviceGetPersistenceMode, nvmlEnableState_t *mode)
NOT_SUPPORTED(nvmlDeviceGetPerformanceState, nvmlPstates_t *state)
NOT_SUPPORTED(nvmlDeviceGetTotalEccErrors, nvmlMemoryErrorType_t type, nvmlEccCounterType_t counter, unsigned long long *errors)
NOT_SUPPORTED(nvmlDeviceGetComputeMode, nvmlComputeMode_t *mode)
NOT_SUPPORTED(nvmlDeviceGetProcessUtilization, nvmlProcessUtilizationSample_t *samples, unsigned *count, unsigned long long since)
#pragma GCC diagnostic pop

/* ---- libcuda: as much of it as makes a context. Results are of CUresult in cuda.h. */

enum { NO_DEVICE = 100, INVALID_DEVICE = 101, OUT_OF_MEMORY = 2, UNKNOWN = 999 };
static int visible[MAX_GPUS], visible_count;

static void choose_devices(void) {
  const char *names = getenv("CUDA_VISIBLE_DEVICES");
  char list[1024], *rest;
  visible_count = 0;
  if (!names) {
    for (int i = 0; i < state.gpus; i++) visible[visible_count++] = i;
    return;
  }
  copy(list, sizeof list, names);
  for (char *word = strtok_r(list, ",", &rest); word; word = strtok_r(NULL, ",", &rest)) {
    int found = -1;
    for (int i = 0; i < state.gpus; i++) {
      char index[16];
      snprintf(index, sizeof index, "%d", i);
      if (!strcmp(word, index) || (!strncmp(word, "GPU-", 4) && !strncmp(state.gpu[i].uuid, word, strlen(word)))) found = i;
    }
    if (found < 0) return; /* CUDA stops at the first entry that it does not know */
    visible[visible_count++] = found;
  }
}
int cuInit(unsigned flags) {
  (void)flags;
  look();
  if (state.cuinit) return state.cuinit < 0 ? NO_DEVICE : state.cuinit;
  choose_devices();
  if (open("/dev/nvidiactl", O_RDWR | O_CLOEXEC) < 0 || !visible_count) return NO_DEVICE;
  if (open("/dev/nvidia-uvm", O_RDWR | O_CLOEXEC) < 0) return UNKNOWN;
  int usable = 0;
  for (int i = 0; i < visible_count; i++) {
    char path[32];
    snprintf(path, sizeof path, "/dev/nvidia%u", state.gpu[visible[i]].minor);
    if (open(path, O_RDWR | O_CLOEXEC) >= 0) visible[usable++] = visible[i]; /* with one missing, the others work */
  }
  visible_count = usable;
  return usable ? 0 : NO_DEVICE;
}
int cuDeviceGetCount(int *count) { *count = visible_count; return 0; }
int cuGetErrorName(int code, const char **name) {
  *name = code == NO_DEVICE ? "CUDA_ERROR_NO_DEVICE" : code == OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR_UNKNOWN";
  return 0;
}
static int current = -1;
static int take(unsigned long long bytes) {
  char line[160];
  look();
  if (state.gpu[current].used + bytes > state.gpu[current].total) return OUT_OF_MEMORY;
  if (state.host_pids) return 0; /* the pid that the node has for this process cannot be known here: the test writes it */
  int length = snprintf(line, sizeof line, "process gpu=%d pid=%d memory=%llu live=1\n", current, getpid(), bytes);
  int file = open(state_path(), O_WRONLY | O_APPEND | O_CLOEXEC);
  if (file < 0) return UNKNOWN;
  ssize_t written = write(file, line, length);
  close(file);
  return written == length ? 0 : UNKNOWN;
}
int cuDevicePrimaryCtxRetain(void **context, int device) {
  if (device < 0 || device >= visible_count) return INVALID_DEVICE;
  current = visible[device];
  *context = &current;
  return take(518ull << 20);
}
int cuCtxSetCurrent(void *context) { return context == &current ? 0 : INVALID_DEVICE; }
int cuMemAlloc_v2(uint64_t *pointer, size_t bytes) {
  *pointer = 0;
  return current < 0 ? INVALID_DEVICE : take(bytes);
}
