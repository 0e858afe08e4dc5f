/* A libnvidia-ml.so.1 without a GPU: it answers what the file named by FAKE_NVML says, a `key=value` a line.
 *
 *   init=18                       what nvmlInitWithFlags returns (18: driver and library differ)
 *   driver=580.95.05  cuda=13000  count=2
 *   gpu0.name=NVIDIA H200         gpu0 is a card, gpu0.mig1 a slice of it
 *   gpu0.error.name=3             the question returns this error (3: not supported)
 *   gpu0.processes=17:1024,self:5 pid:bytes; self and parent are the asking process and its parent; -1 bytes: not told
 *   gpu0.links=1,2                cards on NVLink; gpu0.peers: cards that can be read directly
 *
 * With -DOLD_DRIVER it lacks what libraries of the R450 drivers lack. The layouts are those of pynvml 13.615.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7, UNKNOWN = 999 };
enum { MOST_LINES = 2048, MOST_CARDS = 16, MOST_SLICES = 8, LINE = 512 };

typedef struct { int card, slice; } Device;
typedef struct { unsigned long long total, free, used; } Memory;
typedef struct { unsigned int pid; unsigned long long bytes; unsigned int gpu_instance, compute_instance; } Process;
typedef struct {
    char legacy[16];
    unsigned int domain, bus, device, device_id, subsystem_id;
    char bus_id[32];
} Pci;
typedef struct {
    unsigned int multiprocessors, copy, decoder, encoder, jpeg, ofa, gpu_slices, compute_slices;
    unsigned long long memory_mib;
} Attributes;

static char lines[MOST_LINES][LINE];
static int line_count;
static Device devices[MOST_CARDS][MOST_SLICES + 1];

static const char *value(const char *key) {
    size_t length = strlen(key);
    for (int i = 0; i < line_count; i++)
        if (!strncmp(lines[i], key, length) && lines[i][length] == '=') return lines[i] + length + 1;
    return NULL;
}

static const char *of(const Device *device, const char *field) {
    char key[128];
    if (device->slice < 0) snprintf(key, sizeof key, "gpu%d.%s", device->card, field);
    else snprintf(key, sizeof key, "gpu%d.mig%d.%s", device->card, device->slice, field);
    return value(key);
}

static int failure(const Device *device, const char *question) {
    char field[96];
    snprintf(field, sizeof field, "error.%s", question);
    const char *code = of(device, field);
    return code ? atoi(code) : SUCCESS;
}

static int number(const Device *device, const char *field, unsigned long long *answer) {
    int error = failure(device, field);
    if (error) return error;
    const char *text = of(device, field);
    if (!text) return NOT_SUPPORTED;
    *answer = strtoull(text, NULL, 10);
    return SUCCESS;
}

static int small(const Device *device, const char *field, unsigned int *answer) {
    unsigned long long wide = 0;
    int error = number(device, field, &wide);
    *answer = (unsigned int)wide;
    return error;
}

static int text(const Device *device, const char *field, char *answer, unsigned int size) {
    int error = failure(device, field);
    if (error) return error;
    const char *found = of(device, field);
    if (!found) return NOT_SUPPORTED;
    if (strlen(found) >= size) return INSUFFICIENT_SIZE;
    strcpy(answer, found);
    return SUCCESS;
}

static int listed(const char *list, int wanted) {
    for (; list && *list; list = strchr(list, ',') ? strchr(list, ',') + 1 : NULL)
        if (atoi(list) == wanted) return 1;
    return 0;
}

int nvmlInitWithFlags(unsigned int flags) {
    (void)flags;
    line_count = 0;
    const char *path = getenv("FAKE_NVML");
    FILE *file = path ? fopen(path, "r") : NULL;
    if (!file) return UNKNOWN;
    while (line_count < MOST_LINES && fgets(lines[line_count], LINE, file)) {
        lines[line_count][strcspn(lines[line_count], "\n")] = 0;
        line_count++;
    }
    fclose(file);
    const char *code = value("init");
    return code ? atoi(code) : SUCCESS;
}

int nvmlInit(void) { return nvmlInitWithFlags(0); } /* torch asks so */

int nvmlShutdown(void) { return SUCCESS; }

const char *nvmlErrorString(int code) {
    static char message[32];
    snprintf(message, sizeof message, "Error %d", code);
    return message;
}

int nvmlSystemGetDriverVersion(char *answer, unsigned int size) {
    const char *found = value("driver");
    if (!found) return NOT_SUPPORTED;
    snprintf(answer, size, "%s", found);
    return SUCCESS;
}

int nvmlSystemGetCudaDriverVersion(int *answer) {
    const char *found = value("cuda");
    if (!found) return NOT_SUPPORTED;
    *answer = atoi(found);
    return SUCCESS;
}

int nvmlSystemGetProcessName(unsigned int pid, char *answer, unsigned int size) {
    char key[64];
    snprintf(key, sizeof key, "process%u", pid);
    const char *found = value(key);
    if (!found) return NOT_FOUND;
    snprintf(answer, size, "%s", found);
    return SUCCESS;
}

int nvmlDeviceGetCount_v2(unsigned int *answer) {
    const char *error = value("error.count"), *found = value("count");
    if (error) return atoi(error);
    *answer = found ? atoi(found) : 0;
    return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned int index, Device **answer) {
    unsigned int count = 0;
    nvmlDeviceGetCount_v2(&count);
    if (index >= count || index >= MOST_CARDS) return INVALID_ARGUMENT;
    Device *device = &devices[index][MOST_SLICES];
    *device = (Device){(int)index, -1};
    *answer = device;
    return failure(device, "handle");
}

int nvmlDeviceGetUUID(Device *device, char *answer, unsigned int size) { return text(device, "uuid", answer, size); }
int nvmlDeviceGetName(Device *device, char *answer, unsigned int size) { return text(device, "name", answer, size); }

int nvmlDeviceGetMemoryInfo(Device *device, Memory *answer) {
    int error = number(device, "memory", &answer->total);
    if (error) return error;
    const char *used = of(device, "used");
    answer->used = used ? strtoull(used, NULL, 10) : 0;
    answer->free = answer->total - answer->used;
    return SUCCESS;
}

int nvmlDeviceGetCudaComputeCapability(Device *device, int *major, int *minor) {
    int error = failure(device, "capability");
    if (error) return error;
    const char *found = of(device, "capability");
    return found && sscanf(found, "%d.%d", major, minor) == 2 ? SUCCESS : NOT_SUPPORTED;
}

int nvmlDeviceGetPciInfo_v3(Device *device, Pci *answer) {
    memset(answer, 0, sizeof *answer);
    int error = text(device, "pci", answer->bus_id, sizeof answer->bus_id);
    if (!error) sscanf(answer->bus_id, "%x:%x:%x", &answer->domain, &answer->bus, &answer->device);
    return error;
}

int nvmlDeviceGetEnforcedPowerLimit(Device *device, unsigned int *milliwatts) {
    return small(device, "power_limit", milliwatts);
}

int nvmlDeviceGetMaxClockInfo(Device *device, int kind, unsigned int *mhz) {
    return small(device, kind == 2 ? "memory_clock" : "clock", mhz);
}

int nvmlDeviceGetP2PStatus(Device *one, Device *other, int capability, int *answer) {
    int error = failure(one, "p2p");
    if (error) return error;
    *answer = listed(of(one, capability == 2 ? "links" : "peers"), other->card) ? 0 : 5;
    return SUCCESS;
}

int nvmlDeviceGetCurrentClocksThrottleReasons(Device *device, unsigned long long *answer) {
    return number(device, "reasons", answer);
}

int nvmlDeviceGetComputeRunningProcesses_v2(Device *device, unsigned int *count, Process *answer) {
    int error = failure(device, "processes");
    if (error) return error;
    const char *list = of(device, "processes");
    unsigned int found = 0, room = answer ? *count : 0;
    for (; list && *list; list = strchr(list, ',') ? strchr(list, ',') + 1 : NULL, found++) {
        if (found >= room) continue;
        int pid = !strncmp(list, "self", 4) ? getpid() : !strncmp(list, "parent", 6) ? getppid() : atoi(list);
        const char *colon = strchr(list, ':');
        answer[found] = (Process){(unsigned int)pid, colon ? (unsigned long long)atoll(colon + 1) : 0, -1, -1};
    }
    *count = found;
    return found > room ? INSUFFICIENT_SIZE : SUCCESS;
}

#ifndef OLD_DRIVER

int nvmlDeviceGetComputeRunningProcesses_v3(Device *device, unsigned int *count, Process *answer) {
    return nvmlDeviceGetComputeRunningProcesses_v2(device, count, answer);
}

int nvmlDeviceGetCurrentClocksEventReasons(Device *device, unsigned long long *answer) {
    return number(device, "reasons", answer);
}

int nvmlDeviceGetNumGpuCores(Device *device, unsigned int *cores) { return small(device, "cores", cores); }
int nvmlDeviceGetMemoryBusWidth(Device *device, unsigned int *bits) { return small(device, "bus_width", bits); }

int nvmlDeviceGetMigMode(Device *device, unsigned int *current, unsigned int *pending) {
    int error = small(device, "mig", current);
    *pending = *current;
    return error;
}

int nvmlDeviceGetMaxMigDeviceCount(Device *device, unsigned int *count) {
    *count = of(device, "mig") ? MOST_SLICES - 1 : 0;
    return failure(device, "slices");
}

int nvmlDeviceGetMigDeviceHandleByIndex(Device *device, unsigned int index, Device **answer) {
    if (index >= MOST_SLICES) return INVALID_ARGUMENT;
    Device *slice = &devices[device->card][index];
    *slice = (Device){device->card, (int)index};
    *answer = slice;
    return of(slice, "uuid") ? failure(slice, "handle") : NOT_FOUND;
}

int nvmlDeviceGetGpuInstanceId(Device *device, unsigned int *id) { return small(device, "gpu_instance", id); }
int nvmlDeviceGetComputeInstanceId(Device *device, unsigned int *id) { return small(device, "compute_instance", id); }

int nvmlDeviceGetAttributes_v2(Device *device, Attributes *answer) {
    memset(answer, 0, sizeof *answer);
    int error = number(device, "memory_mib", &answer->memory_mib);
    if (!error) error = small(device, "gpu_slices", &answer->gpu_slices);
    if (!error) error = small(device, "compute_slices", &answer->compute_slices);
    return error;
}

#endif
